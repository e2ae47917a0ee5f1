"""How large the staging memory of a host's ranks is, and in what pieces messages go through it."""

__all__ = ["BUFFER_BYTES", "CHUNK_BYTES", "slot_bytes"]

BUFFER_BYTES = 2**21  # of each of a rank's two staging buffers
# Where every rank has a core, 256 KiB to 1 MiB do equally well; where four ranks share two,
# 512 KiB does best: smaller chunks mean more barriers, larger ones leave the cache.
CHUNK_BYTES = 2**19
ALIGN_BYTES = 64


def slot_bytes(size: int) -> int:
    """Return the most bytes that a chunk of `HostMemory.reduce_to_owners` may have, with `size` ranks."""
    return min(CHUNK_BYTES, BUFFER_BYTES // size) // ALIGN_BYTES * ALIGN_BYTES
