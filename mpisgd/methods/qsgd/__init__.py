"""Gradients in a few bits per element."""
