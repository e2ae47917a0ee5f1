"""Methods x situations as a picture, and as a text with the reasons of what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpisgd.tools.verification.method_matrix import Row, Tried
from mpisgd.tools.verification.situations import SITUATIONS

__all__ = [
    "LABELS",
    "ORDER",
    "PLAIN",
    "draw_matrix",
    "kind_of",
    "one_of_each_kind",
    "outcomes",
    "text_of_matrix",
    "word_of",
]

PLAIN = "plain"
# From what says least to what says most of a place: one fault is more than any number of others.
ORDER = ("", "impossible", "refused", "alone", "equal", "wrong")
COLOURS = ("#ffffff", "#e4e4e4", "#9db4cf", "#b7dfb0", "#2f8f4e", "#c8202f")
LABELS = {
    "equal": "equal to one process, or to its paper",
    "alone": "equal to itself told differently",
    "refused": "refused, with the reason",
    "impossible": "no such program",
    "wrong": "wrong",
}


def kind_of(method: str) -> str:
    """Return a method without its arguments: `TopK` of `compress.TopK(ratio=0.3)`."""
    bare = method
    while (inner := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = inner
    names = [name.rsplit(".", 1)[-1] for name in bare.split(", ")]
    return names[0] if len(names) == 1 else f"{names[0]} with a compressor"


def one_of_each_kind(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the quick form: the first of each kind, in their order."""
    first: dict[str, Row] = {}
    for row in rows:
        if row.is_quick:
            first.setdefault(kind_of(row.name), row)
    return list(first.values())


def outcomes(found: Iterable[Tried]) -> dict[str, dict[str, str]]:
    """Return the outcome of each kind of method in each situation: a word of `ORDER`."""
    places: dict[str, dict[str, str]] = {}
    for tried in found:
        word = word_of(tried)
        row = places.setdefault(kind_of(tried.method), dict.fromkeys([PLAIN, *SITUATIONS], ""))
        for name in tried.situations or (PLAIN,):
            row[name] = max(row[name], word, key=ORDER.index)
    return places


def word_of(tried: Tried) -> str:
    """Return the word of `ORDER` for a program."""
    if tried.kind == "ok":
        return "equal" if tried.has_reference else "alone"
    return "wrong" if tried.is_fault else tried.kind


def text_of_matrix(found: Sequence[Tried]) -> str:
    """Return a line for each reason to refuse something, with the methods and the situations."""
    refused: dict[str, dict[str, None]] = {}
    for tried in found:
        if tried.kind == "refused":
            reason = re.sub(r"\(.*?\)|\[mpisgd:.*?\]|=[^ ]*", "", tried.text).strip()
            refused.setdefault(reason, {})[f"{kind_of(tried.method)}: {', '.join(tried.situations)}"] = None
    lines = []
    for reason, places in sorted(refused.items(), key=lambda item: -len(item[1])):
        lines += [reason, *(f"    {place}" for place in places)]
    return "\n".join(lines) + "\n"


def draw_matrix(found: Sequence[Tried], path: Path) -> None:
    """Draw a place for each kind of method in each situation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    places = outcomes(found)
    columns = [PLAIN, *SITUATIONS]
    values = [[ORDER.index(row[name]) for row in places.values()] for name in columns]
    # Situations are lines, which may be many: a page is narrow.
    figure, axes = plt.subplots(figsize=(2.6 + 0.2 * len(places), 2.9 + 0.2 * len(columns)))
    axes.imshow(values, aspect="auto", cmap=ListedColormap(COLOURS), vmin=0, vmax=len(ORDER) - 1)
    axes.set_yticks(range(len(columns)), columns, fontsize=9)
    axes.set_xticks(range(len(places)), list(places), fontsize=9, rotation=90)
    axes.set_yticks([place - 0.5 for place in range(1, len(columns))], minor=True)
    axes.set_xticks([place - 0.5 for place in range(1, len(places))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    patches = [Patch(facecolor=COLOURS[ORDER.index(word)], label=label) for word, label in LABELS.items()]
    figure.legend(handles=patches, loc="lower left", ncols=2, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
