"""Gradients as the product of two narrow matrices."""
