"""Gradients as whole numbers of a scale for each block."""
