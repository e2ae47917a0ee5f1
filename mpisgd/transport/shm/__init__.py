"""The shared-memory transport: ranks of a host reduce in shared memory, with torch's arithmetic."""
