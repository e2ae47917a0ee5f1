"""What collectives are predicted to cost, and so which algorithm and plane `auto` takes."""

from mpisgd.tuning.model import CostModel, Curve, Measured

__all__ = ["CostModel", "Curve", "Measured"]
