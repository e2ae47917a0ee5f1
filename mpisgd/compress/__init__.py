"""What gradients look like on the wire: one method of compression per file."""

from mpisgd.compress.one_bit import OneBit
from mpisgd.compress.sign_sgd import SignSGD

__all__ = ["OneBit", "SignSGD"]
