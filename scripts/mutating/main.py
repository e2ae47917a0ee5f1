"""The command: draw faults, run the checks on each until one is red, print the score and what survives.

./scripts/mutate --count 300 --seed 7 --out runs/mutants.jsonl
./scripts/mutate --rooms gradients sharding --count 40
./scripts/mutate --by-hand

First each check runs once without a fault, and it is noted which of its parts execute a line of the package;
that is kept in runs/, by a hash of the source. A fault is tried with those parts alone that execute it, the
quickest first. Each is imported by a process that is forked from one that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mutating.by_hand import by_hand
from mutating.items import ARITHMETIC, CHECKS, ROOMS
from mutating.operators import Mutant, mutants_of

__all__ = ["draw", "main", "score"]

ROOT = Path(__file__).resolve().parents[2]
CHECK_NAMES = (*dict.fromkeys(check for kind in CHECKS.values() for part in kind.values() for check in part),)
DERIVED = (
    "paper.py",
    "paper_kit.py",
    "compression_kit.py",
    "cost.py",
    "cost_kit.py",
    "model_sizes.py",
)  # what methods are compared with


def draw(rooms: list[str], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Return so many faults, each room as often as it has lines that can be changed."""
    found = []
    for room in rooms:
        for path in sorted((root / "mpisgd" / room).rglob("*.py")):
            if path.name not in DERIVED:
                found += mutants_of(str(path.relative_to(root / "mpisgd")), path.read_text())
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=50, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS, help="folders to change")
    parser.add_argument("--by-hand", action="store_true", help="instead, those of by_hand.py")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at the same time")
    parser.add_argument("--scored", action="store_true", help="run only checks that count for the score")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument(
        "--out", type=Path, help="a file of results, one line each; what it has is not run again"
    )
    parser.add_argument(
        "--json", type=Path, help="a file for the record of which record_table.py makes tables"
    )
    args = parser.parse_args()
    mutants = [*by_hand(ROOT / "mpisgd")] if args.by_hand else draw(args.rooms, args.count, args.seed)
    if args.list:
        print("\n".join(f"{mutant.name}: {mutant.before!r} -> {mutant.after!r}" for mutant in mutants))
        return
    from mutating.trial import Trials  # which imports torch

    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "results.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
        left = [mutant for mutant in mutants if mutant.name not in _known(out)]
        rooms = {mutant.path.partition("/")[0] for mutant in mutants}
        trials = Trials(ROOT, Path(folder), rooms, scored=args.scored)
        workers = []
        for number in range(args.jobs):
            if (worker := os.fork()) == 0:
                _work(trials, number, left[number :: args.jobs], out)
                os._exit(0)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)
        known = _known(out)
        entries = [known[mutant.name] for mutant in mutants if mutant.name in known]
        print(score(entries))
        if args.json is not None:
            from mpisgd.tools.cli.provenance import provenance  # here alone: faults have been tried

            tables = [by_name(entries)] if args.by_hand else [by_room(entries), not_found(entries)]
            record = {"kind": "mutations", **provenance(), "tables": tables}
            record["command"] = f"./scripts/mutate {shlex.join(sys.argv[1:])}"
            args.json.write_text(json.dumps(record))


def _work(trials: Any, number: int, mutants: list[Mutant], out: Path) -> None:
    """Try faults one after the other, in a copy of one's own."""
    for mutant in mutants:
        began_s = time.monotonic()
        found = trials.run(mutant, number)
        seconds = time.monotonic() - began_s
        entry = {"name": mutant.name, **mutant._asdict(), **found._asdict(), "seconds": round(seconds, 1)}
        with out.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{found.check or 'SURVIVES':9} {seconds:5.0f} s  {mutant.name}  {found.item}", flush=True)


def _known(path: Path) -> dict[str, dict[str, Any]]:
    entries = map(json.loads, path.read_text().splitlines())
    return {entry["name"]: entry for entry in entries}


def by_room(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the title, the columns and the rows of a table: what became of the faults of each room."""
    columns = ["room", "faults", "executed", *CHECK_NAMES, "not found"]
    rows = []
    for room in (*ROOMS, "all"):
        mine = [entry for entry in entries if room in (_room(entry), "all")]
        by = Counter(entry["check"] for entry in mine)
        counts = [len(mine), sum(entry["is_executed"] for entry in mine), *(by[each] for each in CHECK_NAMES)]
        rows += [[room, *map(str, counts), str(by[""])]] if mine else []
    return {"title": "faults, and the first check that finds each", "columns": columns, "rows": rows}


def not_found(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of what no check finds."""
    rows = [
        [
            f"{entry['path']}:{entry['line']}",
            entry["kind"],
            _code(entry["before"]),
            "" if entry["kind"] == "dropped statement" else _code(entry["after"]),
            "yes" if entry["is_executed"] else "no",
        ]
        for entry in entries
        if not entry["check"]
    ]
    return {"title": "not found", "columns": ["where", "fault", "of", "becomes", "executed"], "rows": rows}


def by_name(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of faults by hand."""
    rows = [[entry["kind"], entry["check"] or "not found", f"{entry['seconds']:.0f}"] for entry in entries]
    return {"title": "faults by hand", "columns": ["fault", "found by", "seconds"], "rows": rows}


def _code(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:120]


def _room(entry: dict[str, Any]) -> str:
    return str(entry["path"]).partition("/")[0]


def score(entries: list[dict[str, Any]]) -> str:
    """Return what was found, arithmetic and engine apart, and what survives."""
    lines = []
    for kind, parts in CHECKS.items():
        mine = [e for e in entries if (_room(e) in ARITHMETIC) == (kind == "arithmetic")]
        if not mine:
            continue
        by, found, shares = Counter(entry["check"] for entry in mine), 0, []
        for name, checks in parts.items():
            here = ", ".join(f"{by[check]} by {check}" for check in checks if by[check])
            if not name:
                shares.append(f"{here or 'none'} besides")
                continue
            found += sum(by[check] for check in checks)
            shares.append(f"{found} found by {name} ({found / len(mine):.0%}{': ' if here else ''}{here})")
        executed = sum(entry["is_executed"] for entry in mine)
        lines.append(f"{kind}, of {len(mine)}: {'; '.join(shares)}; {executed} are executed by a check")
    for entry in entries:
        if not entry["check"]:
            how = "survives" if entry["is_executed"] else "not executed"
            lines.append(f"{how}: {entry['name']}: {entry['before']!r} -> {entry['after']!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
