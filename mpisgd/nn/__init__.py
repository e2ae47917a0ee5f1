"""Layers whose result depends on the data of all ranks."""
