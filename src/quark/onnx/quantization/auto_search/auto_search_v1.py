"""Address of AutoSearch."""

from quark.onnx.auto_search.auto_search import AutoSearch as AutoSearch
from quark.onnx.auto_search.auto_search import AutoSearchConfig as AutoSearchConfig
from quark.onnx.auto_search.search_space import SearchSpace as SearchSpace
