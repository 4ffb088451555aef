"""Which tensors carry Q/DQ, and which of them share a scale."""
