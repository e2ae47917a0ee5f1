"""Gradients in 16 bits."""
