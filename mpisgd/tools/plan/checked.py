"""How far a prediction of a kind was checked: beside measured steps, by simulated messages, or not at all.

What was measured is in `measured_kinds`, which `validate_plan.py report` writes from the cases of
benchmarks/plan-validation.md. Of other kinds the collectives are checked, message by message, and what a
step is made of by hand alone.
"""

import re

from mpisgd.tools.bench.strategies.method import Method
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.measured_kinds import MEASURED, MOST_RANKS
from mpisgd.tools.plan.network import Switch
from mpisgd.tools.plan.steps.parallel import Parallel

__all__ = ["CHECKED", "checked_by", "kind_of"]

FORMULAS = ("ParameterServer", "Hogwild")  # one-sided: no rounds of messages to simulate
CHECKED = {
    "measured": f"steps of this kind, on up to {MOST_RANKS} ranks, were measured beside the plan",
    "simulated": "its collectives were compared with simulated messages, its steps with nothing",
    "formula": "compared with nothing",
}


def kind_of(method: Method) -> str:
    """Return the kind of a method: of numbers 0 and 1 alone count, which turn options off or on."""
    strategy = method.strategy.text if isinstance(method.strategy, Parallel) else repr(method.strategy)
    optimizer = "" if method.optimizer is None else f" with {method.optimizer.kind.__name__}"
    text = f"{strategy} + {method.compression!r}{optimizer}"
    return re.sub(r"(?<==)(?!(?:0|1|0\.0|1\.0)\b(?!\.))\d[\d.e+-]*", "#", text)


def checked_by(cluster: Cluster, method: Method) -> str:
    """Return which of CHECKED a prediction is: by its method, what travels, and the network."""
    strategy = type(method.strategy).__name__
    if strategy in FORMULAS or "asynchronous" in method.name:
        return "formula"
    is_measured = kind_of(method) in MEASURED and type(cluster.network) is Switch
    return "measured" if is_measured else "simulated"
