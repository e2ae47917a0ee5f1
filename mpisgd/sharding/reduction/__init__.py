"""Gradients of all ranks become those of the pieces that each rank owns."""
