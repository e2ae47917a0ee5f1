"""Synchronous SGD."""
