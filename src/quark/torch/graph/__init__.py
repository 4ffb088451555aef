"""Graph mode: quantizes what torch.export made, operator by operator."""
