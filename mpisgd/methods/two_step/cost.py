"""What `OneBit(two_step=True)` takes. Signs go to owners of chunks, those of their means to all."""

from mpisgd.methods.coding import Coding

__all__ = ["CODING"]

CODING = Coding(
    collectives=("all_to_all", "all_gather"),
    element_s=5e-9,
    copies=1.0,
    of_chunk=1.0,
    kept=lambda size: 1 + 1 / size,  # the worker's error, and the server's
)
