"""Gradients as signs: eight to a byte."""
