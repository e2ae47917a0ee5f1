"""The largest elements of gradients."""
