"""Address; see ops.quant_stubs."""
