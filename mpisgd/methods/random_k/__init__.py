"""Random elements of gradients."""
