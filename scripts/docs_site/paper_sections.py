"""What stands below a method in the API reference: its algorithm, all of it, as `paper.py` has it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PAPERS", "section_of"]

METHODS = Path(__file__).resolve().parents[2] / "mpisgd" / "methods"
KIT = "[paper_kit](../../../mpisgd/methods/paper_kit.py)"

# The folders of the papers, by the public name of the method.
PAPERS = {
    "mpisgd.Adasum": ("adasum",),
    "mpisgd.Compression": ("cast",),
    "mpisgd.DiLoCo": ("diloco", "slow_mo"),
    "mpisgd.ElasticAveraging": ("elastic_averaging",),
    "mpisgd.Gossip": ("gossip/d_psgd", "gossip/push_sum", "gossip/choco", "gossip/ad_psgd"),
    "mpisgd.LocalSGD": ("local_sgd",),
    "mpisgd.OneBitAdam": ("one_bit_adam", "two_step"),
    "mpisgd.OneBitLamb": ("one_bit_lamb",),
    "mpisgd.ParameterServer": ("parameter_server", "hogwild"),
    "mpisgd.Synchronous": ("synchronous",),
    "mpisgd.ZeroOneAdam": ("zero_one_adam",),
    "mpisgd.compress.DeepGradient": ("deep_gradient",),
    "mpisgd.compress.Natural": ("natural",),
    "mpisgd.compress.OneBit": ("one_bit", "two_step"),
    "mpisgd.compress.PerHost": ("per_host",),
    "mpisgd.compress.PowerSGD": ("power_sgd",),
    "mpisgd.compress.QSGD": ("qsgd",),
    "mpisgd.compress.RandomK": ("random_k",),
    "mpisgd.compress.SignSGD": ("sign_sgd",),
    "mpisgd.compress.TernGrad": ("tern_grad",),
    "mpisgd.compress.Threshold": ("threshold",),
    "mpisgd.compress.TopK": ("top_k",),
}


def section_of(name: str) -> str:
    """The papers of a public name, "" if it has none."""
    return "".join(_section(folder) for folder in PAPERS.get(name, ()))


def _section(folder: str) -> str:
    path = f"mpisgd/methods/{folder}/paper.py"
    text = (METHODS / folder / "paper.py").read_text()
    return (
        f"**The algorithm, all of it**, with all ranks in one process, written with {KIT}: [{path}]"
        f"(../../../{path}). Tests compare this method with it.\n\n```python\n{text}```\n\n"
    )
