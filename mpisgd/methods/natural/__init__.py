"""Gradients as powers of two."""
