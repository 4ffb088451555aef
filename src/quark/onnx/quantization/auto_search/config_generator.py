"""Address of the combinations of a search space."""

from quark.onnx.auto_search.search_space import generate_all_configs as generate_all_configs
