"""What a method is refused in, as it was when it was last looked at: what is allowed today stays allowed.

`refused_pairs.txt` beside this file has a line for each situation, with the kinds of methods that mpisgd
refuses in it, on some ranks and hosts. A refusal that it does not have counts as a fault;
`scripts/checking/refused_pairs.py` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mpisgd.tools.verification.matrix_report import kind_of
from mpisgd.tools.verification.method_matrix import Tried

__all__ = ["KNOWN", "UNKNOWN", "text_of_refusals", "with_unknown"]

KNOWN = Path(__file__).with_name("refused_pairs.txt")
BETWEEN = " | "
UNKNOWN = "refused, and was not before"


def text_of_refusals(found: Iterable[Tried]) -> str:
    """Return the lines of the file, of what became of methods in situations."""
    refused: dict[str, set[str]] = {}
    for tried in found:
        if tried.kind in ("refused", UNKNOWN) and len(tried.situations) == 1:
            refused.setdefault(tried.situations[0], set()).add(kind_of(tried.method))
    return "".join(f"{name}: {BETWEEN.join(sorted(kinds))}\n" for name, kinds in sorted(refused.items()))


def with_unknown(tried: Tried) -> Tried:
    """Return an outcome as it is, or as a fault where a method is refused in what it was not refused in.

    A method may be refused in nothing at all: then it is refused as such. Of several situations each was
    tried alone.
    """
    if tried.kind != "refused" or len(tried.situations) > 1:
        return tried
    is_known = tried.situations and kind_of(tried.method) in _known().get(tried.situations[0], ())
    return tried if is_known else tried._replace(kind=UNKNOWN)


@cache
def _known() -> dict[str, frozenset[str]]:
    lines = (line.partition(": ") for line in KNOWN.read_text().splitlines())
    return {name: frozenset(kinds.split(BETWEEN)) for name, _, kinds in lines}
