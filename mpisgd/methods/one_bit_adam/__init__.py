"""1-bit Adam."""
