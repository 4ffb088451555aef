"""Functions that loaders of other packages call before they load a quantized folder."""
