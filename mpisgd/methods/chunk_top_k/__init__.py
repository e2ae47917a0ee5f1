"""The largest elements of each chunk, in a few bits."""
