"""Whether all ranks start from the same parameters, learning rate and other settings, and keep them.

Ranks that start apart stay apart: they apply equal gradients to different models, and nothing fails.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import ranks_text
from mpisgd.call_site import warn_at_call_site
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveMismatch
from mpisgd.parameters.fingerprint import fingerprints

__all__ = ["SETTINGS_EVERY", "check_alike"]

SETTINGS_EVERY = 100  # steps, after which settings are compared again

PLAIN = (bool, int, float, str, type(None))
MOST_LINES = 5


def check_alike(
    kind: str,
    named: Sequence[tuple[str, Tensor]],
    param_groups: Sequence[dict[str, Any]],
    group: Group,
    when: str,
    *,
    unless: str = "",
    has_started: bool = False,
) -> bool:
    """Raise on every rank unless all ranks have the same bits and settings. Collective.

    Parameters that differ after the start may differ by rounding alone, where hosts have unlike processors:
    that is a warning, on the first rank. Return whether they do.

    Args:
        kind: of optimizer.
        named: what must have the same bits.
        param_groups: of the optimizer; of each what is a number, a text, or a tensor of one element.
        group: the ranks.
        when: the step.
        unless: what those may do who mean it, for the message.
        has_started: whether there were steps before.

    Cost: one pass over `named`, and one small exchange.
    """
    prints = fingerprints([tensor for _, tensor in named])
    settings = [_settings(options) for options in param_groups]
    told = hashlib.blake2b(repr((prints, settings)).encode(), digest_size=8).digest()
    everyones = torch.empty(group.size, 8, dtype=torch.uint8)
    group.queue.run(
        Operation(f"{kind}.step", extra="do all ranks start alike?", when=when),
        lambda: group.queue.communicator.all_gather(
            everyones.view(-1), torch.frombuffer(bytearray(told), dtype=torch.uint8)
        ),
    )
    if not bool((everyones != everyones[0]).any()):
        return False
    differ, lines = _differences([name for name, _ in named], prints, settings, group)
    which = f"(first: {differ[0]}; {len(differ)} of {len(named)})" if differ else ""
    if differ and has_started and group.rank == group.ranks[0]:
        warn_at_call_site(
            f"{kind}: the ranks have different parameters {which}, {when}. The program changes gradients "
            "or parameters after backward(), differently on each rank. check_in_sync_every=1 finds the step; "
            "mpisgd.broadcast_parameters(model) makes the ranks equal again"
        )
    elif differ and not has_started:
        lines.insert(
            0,
            f"the ranks start from different parameters {which}; "
            f"call mpisgd.broadcast_parameters(model) after it is built{unless}",
        )
    if lines:
        raise CollectiveMismatch("\n  ".join([*lines[:MOST_LINES], f"found by {kind}, {when}"]))
    return True


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Describe a parameter group for comparison among ranks.

    Without what is False or None: torch adds such entries when it loads a state, `differentiable` among them.
    """
    found = {}
    for key, value in sorted(options.items()):
        if value is None or value is False:
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = repr(value.item())
        elif key not in ("params", "param_names") and _is_plain(value):
            found[key] = repr(value)
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _differences(
    names: Sequence[str], prints: list[int], settings: list[dict[str, Any]], group: Group
) -> tuple[list[str], list[str]]:
    """Return which parameters differ, and the settings that do, in lines. Collective."""
    everyones: list[Any] = [None] * group.size
    all_gather_object(everyones, (prints, settings), group)
    lines = []
    for number, mine in enumerate(settings):
        for key in sorted(mine.keys() | {key for _, theirs in everyones for key in theirs[number]}):
            values = [theirs[1][number].get(key, "not set") for theirs in everyones]
            if len(set(values)) > 1:
                told = [
                    f"{ranks_text([r for r, v in zip(group.ranks, values, strict=True) if v == one])}: {one}"
                    for one in dict.fromkeys(values)
                ]
                lines.append(f"the setting {key!r} of parameter group {number} differs ({'; '.join(told)})")
    differ = [name for place, name in enumerate(names) if len({p[place] for p, _ in everyones}) > 1]
    return differ, lines
