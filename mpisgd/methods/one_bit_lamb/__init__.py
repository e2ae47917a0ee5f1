"""1-bit LAMB."""
