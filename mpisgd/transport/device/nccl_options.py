"""Options of NCCL that a program gives, as torch's `ProcessGroupNCCL.Options`: checked, compared, passed on.

What torch has of them depends on the NCCL it was built with. So an option is whatever differs from torch's
own default. Their timeout is not used, as torch does not use it either: it is the group's.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mpisgd.accelerator.runtime import runtime
from mpisgd.arguments import ranks_text, shown
from mpisgd.errors import InvalidArgument

__all__ = ["describe", "disagreement", "fresh_options"]

FORM = "expected a torch.distributed.ProcessGroupNCCL.Options"
NOT_BLOCKING = 0


def _complaint(given: Any) -> str:
    """Say what is wrong with the options of a program, "" for nothing."""
    if given is None:
        return ""
    if not runtime().has_nccl():
        return f"pg_options={shown(given)}; {FORM}, and this torch has no NCCL"
    if not isinstance(given, type(runtime().nccl_options())):
        return f"pg_options={shown(given)}; {FORM}"
    if given.split_from is not None:
        return "pg_options.split_from is set; mpisgd itself chooses the communicator to split from"
    chosen = _chosen(given)
    if chosen.get("blocking") == NOT_BLOCKING:
        return "pg_options.config.blocking=0; a communicator that is made without blocking was never tested"
    fewest, most = chosen.get("min_ctas", 1), chosen.get("max_ctas", float("inf"))
    if fewest < 1 or most < fewest:
        return (
            f"pg_options.config has min_ctas={fewest} and max_ctas={most}; expected 1 <= min_ctas <= max_ctas"
        )
    return ""


def describe(given: Any) -> tuple[str, str]:
    """Return options as text, the same for the same ones and "" for none; and what is wrong with them."""
    if wrong := _complaint(given):
        return "", wrong
    return ", ".join(f"{name}={value!r}" for name, value in sorted(_chosen(given).items())), ""


def disagreement(name: str, told: Sequence[tuple[str, str]]) -> InvalidArgument | None:
    """Return the error of every rank where the options of one are wrong, or those of two differ.

    Args:
        name: of the call.
        told: by rank, what `describe` says.
    """
    by_text: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, text in enumerate(told):
        by_text[text].append(rank)
    wrong = [f"{ranks_text(ranks)}: {complaint}" for (_, complaint), ranks in by_text.items() if complaint]
    if not wrong and len(by_text) == 1:
        return None
    given = [f"{ranks_text(ranks)}: {text or 'none'}" for (text, _), ranks in by_text.items()]
    reasons = wrong or [f"the ranks of the job give different pg_options: {'; '.join(given)}"]
    error = InvalidArgument(f"{name}: {'; '.join(reasons)}")
    error.on_every_rank = True
    return error


def fresh_options(given: Any) -> Any:
    """Return options of torch's that have what is chosen in `given`; each communicator changes its own."""
    options = runtime().nccl_options()
    for name, value in _chosen(given).items():
        setattr(options if name == "is_high_priority_stream" else options.config, name, value)
    return options


def _chosen(given: Any) -> dict[str, Any]:
    """Return by name what differs from torch's default."""
    if given is None:
        return {}
    default = runtime().nccl_options()
    chosen = {name: getattr(given.config, name) for name in _names(default.config)}
    chosen = {name: value for name, value in chosen.items() if value != getattr(default.config, name)}
    if given.is_high_priority_stream != default.is_high_priority_stream:
        chosen["is_high_priority_stream"] = given.is_high_priority_stream
    return chosen


def _names(config: Any) -> list[str]:
    """Return the names of the fields of torch's NCCLConfig."""
    names = [name for name in dir(config) if not name.startswith("_")]
    return [name for name in names if not callable(getattr(config, name))]
