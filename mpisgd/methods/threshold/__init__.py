"""Elements of gradients that pass a threshold."""
