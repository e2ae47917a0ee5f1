"""Gradients as signs, with error feedback."""
