"""The colours of pictures: a library or a method has the same one in all of them."""

import re
from collections.abc import Iterable

__all__ = ["COLOURS", "GREY", "colour_of", "colours_and_styles"]

# For what has none of its own, in this order.
COLOURS = ("#0b6e4f", "#c8553d", "#3d6fb4", "#8a5a9e", "#d99a2b", "#5f6b73", "#2aa7a1", "#a23b72")
GREY = "#4a4a4a"
NUM_STYLES = 3
# By the beginning of the name, or by what is added with +.
KNOWN = {
    "mpisgd": COLOURS[0],
    "one process, not kept": "#e3a396",
    "one process": COLOURS[1],
    "no communication": COLOURS[5],
    "gloo": COLOURS[2],
    "DDP on gloo": COLOURS[2],
    "horovod": COLOURS[3],
    "MPI": COLOURS[4],
    "nccl": COLOURS[6],
    "Synchronous": "#222222",
    "Overlap": "#a8a8a8",
    "LocalSGD": "#5fb292",
    "DiLoCo": COLOURS[1],
    "Gossip": COLOURS[2],
    "ElasticAveraging": COLOURS[3],
    "ParameterServer": "#6b4f2a",
    "Sharded": COLOURS[5],
    "FullyShard": COLOURS[7],
    "auto": "#b59ac6",
    "bf16": "#8fa3b5",
    "PowerSGD": COLOURS[6],
    "TopK": COLOURS[4],
    "DeepGradient": "#e0699f",
    "QSGD": "#17517a",
    "OneBit": "#7f7f00",
    "OneBitAdam": "#7f7f00",
}
OPTIMIZERS = re.compile(r"with (OneBit\w+|ZeroOne\w+)")


def colour_of(name: str) -> str | None:
    """Return the colour of a library, or of a method such as `Synchronous + PowerSGD(rank=4)`."""
    optimizer = OPTIMIZERS.search(name)
    if optimizer:
        return KNOWN.get(optimizer[1])
    added = re.search(r" \+ (\w+)", name)
    key = added[1] if added else name
    return KNOWN.get(key) or KNOWN.get(re.split(r"[(,]| with ", key)[0].strip())


def colours_and_styles(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return a colour for each name, and a number that tells apart those of one colour."""
    names = list(dict.fromkeys(names))
    taken = {colour_of(name) for name in names}
    free = [colour for colour in COLOURS if colour not in taken] or list(COLOURS)
    found: dict[str, tuple[str, int]] = {}
    for name in names:
        colour = colour_of(name) or free[sum(not colour_of(other) for other in found) % len(free)]
        same = sum(other == colour for other, _ in found.values())
        found[name] = (colour, same % NUM_STYLES)
    return found
