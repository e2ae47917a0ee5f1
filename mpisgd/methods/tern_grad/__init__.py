"""Gradients as -1, 0 and 1."""
