"""Writing what was decided: Q/DQ pairs, dynamic and weight-only nodes, extended operators."""
