"""Address of the quantized modules. The code is in quark.torch.layers."""

from quark.torch.layers.conv2d import QuantConv2d as QuantConv2d
from quark.torch.layers.conv_transpose2d import QuantConvTranspose2d as QuantConvTranspose2d
from quark.torch.layers.embedding import QuantEmbedding as QuantEmbedding
from quark.torch.layers.embedding_bag import QuantEmbeddingBag as QuantEmbeddingBag
from quark.torch.layers.linear import QuantLinear as QuantLinear
