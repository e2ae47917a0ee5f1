"""Inject faults into training runs and count the results: the program behind `./scripts/faults`."""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from fault_kinds import KINDS, Outcome, Round, obstacle

from mpisgd.tools.cli.provenance import provenance

HEADER = ("kind", "faults", "as promised", "steps lost", "recovery s (median)", "(max)")


def rounds(kinds: Sequence[str], count: int, seed: int, in_a_row: int) -> Iterable[Outcome]:
    """Run each kind `count` times; yield the outcomes. The same seed gives the same faults."""
    for kind in kinds:
        for number in range(count):
            with tempfile.TemporaryDirectory(prefix="mpisgd-faults-") as folder:
                turn = Round(random.Random(f"{seed} {kind} {number}"), Path(folder), in_a_row)
                yield KINDS[kind](turn)


def row(kind: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """The row of a kind in the table."""
    lost = [steps for outcome in outcomes for steps in outcome.steps_lost]
    recovery_s = [seconds for outcome in outcomes for seconds in outcome.recovery_s]
    return (
        kind,
        str(sum(outcome.faults for outcome in outcomes)),
        f"{sum(not outcome.wrong for outcome in outcomes)} of {len(outcomes)}",
        str(sum(lost)) if lost else "-",
        f"{statistics.median(recovery_s):.2f}" if recovery_s else "-",
        f"{max(recovery_s):.2f}" if recovery_s else "-",
    )


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows, with the header, as aligned text."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(HEADER))]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description="Inject faults into training runs and count the results."
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults (default: 0)")
    parser.add_argument(
        "--in-a-row", type=int, default=5, metavar="N", help="faults per run of kill-in-a-row (default: 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to this file")
    parser.add_argument("--list", action="store_true", help="print the kinds and exit")
    return parser.parse_args()


def main() -> int:
    """Run all rounds; the exit code."""
    options = parse()
    if options.list:
        print(*(f"{kind:<20}{function.__doc__}" for kind, function in KINDS.items()), sep="\n")
        return 0
    possible = [kind for kind in options.kind if not (reason := obstacle(kind)) or _left_out(kind, reason)]
    outcomes: list[Outcome] = []
    for outcome in rounds(possible, options.rounds, options.seed, options.in_a_row):
        outcomes.append(outcome)
        state = "; ".join(outcome.wrong) or "as promised"
        print(f"{outcome.kind:<20}{outcome.seconds:6.1f} s  {outcome.what[:90]}: {state}", flush=True)
    of_kind = {kind: [outcome for outcome in outcomes if outcome.kind == kind] for kind in possible}
    print("", table([HEADER, *(row(kind, found) for kind, found in of_kind.items())]), sep="\n")
    if options.json is not None:
        kept = [{**asdict(outcome), "said": outcome.said if outcome.wrong else ""} for outcome in outcomes]
        rows = [row(kind, found) for kind, found in of_kind.items()]
        record = {"kind": "faults", **provenance(), "columns": HEADER, "cells": rows, "outcomes": kept}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(outcome.wrong for outcome in outcomes))


def _left_out(kind: str, reason: str) -> bool:
    print(f"{kind:<20}left out: {reason}")
    return False


if __name__ == "__main__":
    sys.exit(main())
