"""What collectives are predicted to cost, and so which algorithm and plane `auto` takes."""

from mpisgd.comm.costs.model import CostModel, Curve, Measured

__all__ = ["CostModel", "Curve", "Measured"]
