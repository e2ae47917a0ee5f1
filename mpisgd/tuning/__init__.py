"""What collectives are predicted to cost, and so which algorithm and transport `auto` takes."""

from mpisgd.tuning.curve import Curve, Segment
from mpisgd.tuning.model import CostModel, Measured

__all__ = ["CostModel", "Curve", "Measured", "Segment"]
