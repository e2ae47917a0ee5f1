"""Gradients as signs."""
