"""The report: all findings as text and as JSON, to be pasted into an issue."""

import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.catalog import MPI, NCCL
from gpu_checks.gpu import FAILS, HOLDS, LEFT_OUT, Finding
from mpisgd.tools.bench.report.tables import new_table, show, tables_of

SEEN = 150  # characters of what was seen where a check holds; all of it is in the JSON


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        name: of the check.
        what: the property.
        ranks: how many.
        by: the transport.
        finding: of all ranks.
        seconds: that the job took.
        log: its last lines, where it failed.
    """

    name: str
    what: str
    ranks: int
    by: str
    finding: Finding
    seconds: float = 0.0
    log: Sequence[str] = ()


@dataclass
class Report:
    """What is known so far.

    Attributes:
        header: when, by what command, of which commit.
        facts: of the machine; empty where its job failed.
        results: in order.
        records: of the benches, by name and setting.
    """

    header: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    records: dict[str, Any] = field(default_factory=dict)

    def of(self, verdict: str) -> list[Result]:
        """The results with a verdict."""
        return [result for result in self.results if result.finding.verdict == verdict]

    def exit_code(self) -> int:
        """0: something was checked and all holds; 1: something fails; 2: nothing could be checked."""
        if self.of(FAILS):
            return 1
        return 0 if self.of(HOLDS) else 2

    def summary(self) -> str:
        """One line."""
        numbers = {verdict: len(self.of(verdict)) for verdict in (HOLDS, FAILS, LEFT_OUT)}
        said = f"{numbers[HOLDS]} hold, {numbers[FAILS]} fail, {numbers[LEFT_OUT]} left out"
        return said if numbers[HOLDS] or numbers[FAILS] else f"nothing could be checked: {said}"

    def as_json(self) -> str:
        """All of it."""
        checks = [
            {**asdict(result), **asdict(result.finding), "seconds": round(result.seconds, 1)}
            for result in self.results
        ]
        for check in checks:
            del check["finding"]
        content = {"kind": "gpu_check", **self.header, "machine": self.facts, "summary": self.summary()}
        return json.dumps({**content, "checks": checks, "benches": self.records}, indent=1) + "\n"

    def as_text(self) -> str:
        """All of it but the figures of single rounds."""
        file = io.StringIO()
        show([], [self.summary(), ""], file)
        table = new_table(
            f"checks; by {NCCL}, or by {MPI}: through host memory, or by an MPI that is CUDA-aware",
            ["check", "expected", "seen"],
            ["ranks", "by", "verdict", "s"],
        )
        for result in (result for result in self.results if result.finding.verdict != LEFT_OUT):
            found = result.finding
            seen = (
                found.seen
                if found.verdict == FAILS
                else textwrap.shorten(found.seen, SEEN, placeholder=" ...")
            )
            words = (result.name, found.expected, seen)
            numbers = (str(result.ranks), result.by, found.verdict, f"{result.seconds:.0f}")
            table.add_row(*map(_plain, words), *numbers)
        tables = [table] if table.row_count else []
        for name, record in self.records.items():
            for table in tables_of(record["kind"], record["rows"]):
                table.title = f"{name}: {table.title}"
                tables.append(table)
        show(tables, [*self._ends(), *self._left_out(), *_machine(self.header, self.facts)], file)
        return file.getvalue()

    def _ends(self) -> list[str]:
        """The last lines of the jobs that failed."""
        lines = []
        for result in self.of(FAILS):
            lines += [
                f"--- {result.name}, {_ranks(result)}: {result.what}; the end of its output:",
                *(result.log or ["(none)"]),
            ]
        return lines

    def _left_out(self) -> list[str]:
        """What was not checked, and why."""
        named: dict[str, dict[str, list[str]]] = {}
        for result in self.of(LEFT_OUT):
            of_reason = named.setdefault(result.finding.seen, {})
            of_reason.setdefault(result.name, []).append(_ranks(result))
        return [
            "left out: "
            + ", ".join(f"{name} ({'; '.join(where)})" for name, where in names.items())
            + f": {reason}"
            for reason, names in named.items()
        ]

    def write(self, folder: Path) -> None:
        """Write both files."""
        (folder / "report.txt").write_text(self.as_text())
        (folder / "report.json").write_text(self.as_json())


def _ranks(result: Result) -> str:
    return f"{result.ranks} rank{'s' * (result.ranks > 1)} by {result.by}"


def _plain(text: str) -> str:
    """Text in which rich sees no markup."""
    return text.replace("[", r"\[")


def _machine(header: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """What one must know to repeat it."""
    lines = [f"{name}: {value}" for name, value in header.items()]
    if not facts:
        return lines
    gpus = "simulated" if facts["simulated"] else facts["gpus"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines += [
        f"GPUs: {gpus}; driver: {facts['driver']}; CUDA: {facts['cuda'] or 'none'}; NCCL: {facts['nccl']}"
    ]
    lines += [versions]
    if facts["mpi"]:
        aware = "CUDA-aware" if facts["cuda_aware"] else "not CUDA-aware"
        lines += [
            f"{facts['mpi']['library'].split(',')[0]}, {aware}, thread level {facts['mpi']['thread_level']}"
        ]
    settings = {**facts["set_before"]}
    return lines + [f"settings: {', '.join(f'{k}={v}' for k, v in settings.items())}"] * bool(settings)
