"""Local SGD."""
