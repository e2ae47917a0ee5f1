"""How far a prediction of a kind was checked: beside measured steps, by simulated messages, or not at all.

The table is what `scripts/validate_plan.py` has measured so far: the cases of benchmarks/plan-validation.md.
Of other kinds the collectives are checked, message by message, and what a step is made of by hand alone.
"""

from mpisgd.bench.strategies.method import Method
from mpisgd.plan.cluster import Cluster
from mpisgd.plan.network import Switch

__all__ = ["CHECKED", "MEASURED_COMPRESSIONS", "MEASURED_STRATEGIES", "checked_by"]

MEASURED_STRATEGIES = (
    "Synchronous",
    "Overlap",
    "LocalSGD",
    "DiLoCo",
    "ElasticAveraging",
    "Gossip('ring')",
    "Parallel(pp=2",
    "Parallel(tp=2)",
)
MEASURED_COMPRESSIONS = ("", "bf16", "PowerSGD")
FORMULAS = ("ParameterServer", "Hogwild")  # one-sided: no rounds of messages to simulate
CHECKED = {
    "measured": "steps of this kind, on up to 8 ranks, were measured beside the plan",
    "simulated": "its collectives were compared with simulated messages, its steps with nothing",
    "formula": "compared with nothing",
}


def checked_by(cluster: Cluster, method: Method) -> str:
    """Return which of CHECKED a prediction is: by its method, what travels, and the network."""
    strategy, _, compression = (word.strip() for word in method.name.partition("+"))
    if strategy.startswith(FORMULAS) or "asynchronous" in strategy:
        return "formula"
    is_known = strategy.startswith(MEASURED_STRATEGIES) and compression.partition("(")[0] in (
        MEASURED_COMPRESSIONS
    )
    return "measured" if is_known and type(cluster.network) is Switch else "simulated"
