"""Sequences divided among ranks: attention over keys and values that travel around a ring of them."""
