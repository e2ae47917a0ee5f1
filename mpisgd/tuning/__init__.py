"""What collectives are predicted to cost, and so which algorithm and transport `auto` takes."""

from mpisgd.tuning.curve import Curve, LineSegment
from mpisgd.tuning.model import CostModel, MeasuredCurves

__all__ = ["CostModel", "Curve", "LineSegment", "MeasuredCurves"]
