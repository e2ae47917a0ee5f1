"""What `SignSGD` takes. Votes go to owners of chunks and the outcome to all ranks; or all signs to all."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.sign_sgd.sign_sgd import SignSGD

__all__ = ["coding"]


def coding(method: SignSGD) -> Coding:
    """Return what it does with a bucket."""
    if method.majority_vote:
        return Coding(collectives=("all_to_all", "all_gather"), element_s=5e-9, copies=0.75)
    return Coding(element_s=5e-9, copies=2.0)
