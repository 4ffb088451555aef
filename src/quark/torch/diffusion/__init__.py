"""Networks of diffusers: their folders, and what its loader asks of a quantized one."""
