"""The 1-bit average with two errors."""
