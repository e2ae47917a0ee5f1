"""A parameter server whose servers are memory with a lock."""
