"""The node plane: ranks that share a host reduce in shared memory, with torch's arithmetic."""
