"""The command: draw faults, run the checks on each until one is red, print the score and what survives.

./scripts/mutate --count 300 --seed 7 --out runs/mutants.jsonl
./scripts/mutate --rooms gradients sharding --count 40 --deep
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mutating.checks import ARITHMETIC, ROOMS, checks_for
from mutating.operators import Mutant, mutants_of

__all__ = ["draw", "main", "score"]

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", "runs", "site", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
PATIENCE_S = 3600.0  # for a check without a fault
LONGEST, PAUSE_S = 4.0, 30.0  # a check that takes so many times as long, and so much more, hangs
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
    parser.add_argument("--deep", action="store_true", help="the long checks, too: about half an hour each")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument(
        "--out", type=Path, help="a file of results, one line each; what it has is not run again"
    )
    args = parser.parse_args()
    mutants = draw(args.rooms, args.count, args.seed)
    if args.list:
        print("\n".join(f"{mutant.name}: {mutant.before!r} -> {mutant.after!r}" for mutant in mutants))
        return
    known = _known(args.out)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        limits_s = _check_sound(copy, sorted({_room(mutant) for mutant in mutants}), deep=args.deep)
        for mutant in mutants:
            if mutant.name not in known:
                known[mutant.name] = _try(mutant, copy, limits_s, deep=args.deep)
                _keep(args.out, known[mutant.name])
    print(score([known[mutant.name] for mutant in mutants]))


def _room(mutant: Mutant) -> str:
    return mutant.path.partition("/")[0]


def _check_sound(copy: Path, rooms: list[str], *, deep: bool) -> dict[tuple[str, ...], float]:
    """Raise where a check is red without a fault: it would find anything. Return how long each may take."""
    limits_s: dict[tuple[str, ...], float] = {}
    for check in itertools.chain.from_iterable(checks_for(room, copy, deep=deep) for room in rooms):
        if check.words not in limits_s:
            outcome = check.run(copy, PATIENCE_S)
            print(f"without a fault {outcome.seconds:5.0f} s  {check.name}", flush=True)
            if outcome.is_red:
                raise SystemExit(f"{' '.join(check.words)}: red without a fault")
            limits_s[check.words] = LONGEST * outcome.seconds + PAUSE_S
    return limits_s


def _try(mutant: Mutant, copy: Path, limits_s: dict[tuple[str, ...], float], *, deep: bool) -> dict[str, Any]:
    path = copy / "mpisgd" / mutant.path
    right = path.read_text()
    path.write_text(mutant.applied(right))
    found, seconds = "", 0.0
    try:
        for check in checks_for(_room(mutant), copy, deep=deep):
            outcome = check.run(copy, limits_s[check.words])
            seconds += outcome.seconds
            if outcome.is_red:
                found = check.name
                break
    finally:
        path.write_text(right)
    print(f"{'found' if found else 'SURVIVES'} {seconds:5.0f} s  {mutant.name}  {found}", flush=True)
    return {"name": mutant.name, **mutant._asdict(), "found": found, "seconds": round(seconds, 1)}


def _known(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    entries = map(json.loads, path.read_text().splitlines())
    return {entry["name"]: entry for entry in entries}


def _keep(path: Path | None, entry: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def score(entries: list[dict[str, Any]]) -> str:
    """Return what was found, arithmetic and engine apart, and what survives."""
    lines = []
    for kind in ("arithmetic", "engine"):
        mine = [e for e in entries if (e["path"].partition("/")[0] in ARITHMETIC) == (kind == "arithmetic")]
        found = [entry for entry in mine if entry["found"]]
        if mine:
            by: dict[str, int] = {}
            for entry in found:
                by[entry["found"]] = by.get(entry["found"], 0) + 1
            shares = ", ".join(f"{count} by {name}" for name, count in by.items())
            lines.append(
                f"{kind}: {len(found)} of {len(mine)} found ({len(found) / len(mine):.0%}): {shares}"
            )
    lines += [f"survives: {e['name']}: {e['before']!r} -> {e['after']!r}" for e in entries if not e["found"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
