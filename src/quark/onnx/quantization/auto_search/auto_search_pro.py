"""Address of AutoSearchPro."""

from quark.onnx.auto_search.auto_search_pro import AutoSearchPro as AutoSearchPro
