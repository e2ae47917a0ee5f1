"""The tables of docs/concepts/combinations.md, "What goes with what", from the methods' declarations.

python scripts/docs_site/goes_with_tables.py --write    # renew them; a test compares
"""

import argparse
import sys
from pathlib import Path

from measurements import as_markdown

from mpisgd.methods import catalogue
from mpisgd.methods.cast.cast import Cast
from mpisgd.methods.strategy.goes_with import OPTIONS, SITUATIONS, GoesWith

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "combinations.md"
BEGIN, END = "<!-- generated: goes_with_tables.py -->", "<!-- end of generated -->"
FIRST = ("Synchronous", "Sharded")

# What rows are called that are not called as the argument that they are about.
ROWS = {
    "op": "`op` other than AVG",
    "adaptive_sum": "`op=mpisgd.Adasum`",
    "reproducible": '`reproducible="ranks"`',
    "whole_gradients": "LBFGS",
    "backward_passes_per_step": "`backward_passes_per_step`",
    "clip_grad_norm_": "`clip_grad_norm_`",
    "grad_scaler": "GradScaler",
    "sparse_gradients": "sparse gradients",
    "closures": "`step(closure)`",
    "uneven_data": "`join()`",
    "context_parallel": "`context_parallel` among its ranks",
    "repeats": "the same result in every run",
    "elastic": "elastic training",
    "checkpoint": "checkpoint",
}


def columns() -> dict[str, list[GoesWith]]:
    """The declarations by the names of their columns: those that go with the same things share one."""
    found: dict[str, list[GoesWith]] = {}
    kinds = sorted(catalogue.strategies(), key=lambda kind: (kind.__name__ not in FIRST, kind.__name__))
    for kind in sorted(kinds, key=lambda kind: kind.__name__ != FIRST[0]):
        for example in kind.examples():
            found.setdefault(example.goes_with.of or kind.__name__, []).append(example.goes_with)
    for optimizer in catalogue.optimizers():
        found.setdefault(optimizer.goes_with.of or optimizer.__name__, []).append(optimizer.goes_with)
    return found


def generated() -> str:
    """Both tables."""
    found = columns()
    head = ["", *found]
    rows = [["`compression`", *(each[0].compression.words for each in found.values())]]
    for name in (*OPTIONS, *SITUATIONS):
        answers = [each[0].answer(name) for each in found.values()]
        rows.append([ROWS.get(name, f"`{name}`"), *(a.words if a.goes else "no" for a in answers)])
    return f"{as_markdown(head, rows)}\n{as_markdown(head, _compressions(found))}"


def _compressions(found: dict[str, list[GoesWith]]) -> list[list[str]]:
    rows = []
    for kind in catalogue.compressors():
        examples = [each for each in kind.examples() if kind is not Cast or each != Cast("none")]
        if not examples:  # it only chooses another one
            continue
        casts = ", .".join(each.short_name for each in examples)
        row = [f"`{f'Compression.{casts}' if kind is Cast else kind.__name__}`"]
        for declared in found.values():
            goes = [any(not method.compression.why_not(each) for method in declared) for each in examples]
            row.append("yes" if all(goes) else "some" if any(goes) else "no")
        rows.append(row)
    return rows


def with_tables(text: str) -> str:
    """The page with the tables of today."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Print the tables, or write them to the page."""
    parser = argparse.ArgumentParser(description="Print the tables of what goes with what.")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text()))
    else:
        sys.stdout.write(generated())


if __name__ == "__main__":
    main()
