"""`python -m mpisgd top`: what the ranks of a running job do, seen from another terminal of their host.

It loads neither torch nor MPI: the cores are the job's.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, NamedTuple

import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mpisgd.arguments import ranks_text
from mpisgd.config import is_launched
from mpisgd.errors import JobError
from mpisgd.monitor.hang_report import activity, for_whom, main_wait
from mpisgd.monitor.mailbox_pages import Steps
from mpisgd.monitor.rank_state import RUNS, RankState, Wait
from mpisgd.tools.bench.report.rows import as_bytes
from mpisgd.tools.cli.job_finder import FoundJob, choose_job, describe, find_jobs

__all__ = ["Usage", "as_lines", "cells_of", "table_of", "top"]

HEADINGS = ("rank", "pid", "step", "steps/s", "last step", "memory", "shared", "cpu", "what it does")
WIDE_ONLY = ("last step", "shared")
WIDE = 120  # columns of a terminal from which on there is room for these
SAMPLE_S = 0.2  # of the time that a process spends on a core
ENDED = "the job has ended"

Pid = Annotated[int | None, typer.Option(help="A process of the job, if several jobs run here.")]
Once = Annotated[bool, typer.Option("--once", help="Print the table once, as plain text.")]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")]


class Usage(NamedTuple):
    """What a process takes: memory of its own, memory that it shares with others, and cores."""

    own_bytes: int = 0
    shared_bytes: int = 0
    cores: float = 0.0


def top(pid: Pid = None, once: Once = False, interval: Interval = 1.0) -> None:
    """Show what each rank of a running job on this host does: step, rate, memory, and for whom it waits.

    Run it in another terminal, without mpirun, as the user who has started the job.
    """
    if is_launched():
        raise JobError("top looks at a job from outside: run it in another terminal, without mpirun")
    watch = _Watch(choose_job(pid))
    if once or not sys.stdout.isatty():
        time.sleep(SAMPLE_S)
        typer.echo("\n".join(watch.lines()))
        return
    try:
        watch.live(interval)
    except KeyboardInterrupt:
        return


class _Watch:
    """A job that is looked at, again and again."""

    def __init__(self, job: FoundJob) -> None:
        self._host = os.uname().nodename
        self._follow(job)

    def _follow(self, job: FoundJob) -> None:
        self._job = job
        self._processes = {pid: _process(pid) for pid in job.pids}
        for pid in job.pids:
            self._usage(pid)  # the share of a core counts from now on

    def _usage(self, pid: int) -> Usage:
        process = self._processes[pid]
        try:
            if process is None:
                return Usage()
            memory = process.memory_info()
            shared = getattr(memory, "shared", 0)
            return Usage(memory.rss - shared, shared, process.cpu_percent() / 100)
        except psutil.Error:
            return Usage()

    def _cells(self) -> list[tuple[str, ...]]:
        states, now_ns = self._job.states(self._host), time.monotonic_ns()
        members = self._job.members.values()
        return [
            cells_of(state, states, member.steps, self._usage(member.who.process.pid), now_ns)
            for member, state in zip(members, states, strict=True)
        ]

    def _heading(self) -> str:
        return f"{self._host}: {describe(self._job)}"

    def lines(self) -> list[str]:
        """Return it as plain text."""
        return [self._heading(), *as_lines(self._cells(), shutil.get_terminal_size((100, 24)).columns)]

    def live(self, interval_s: float) -> None:
        """Show it until the job ends, or for ever."""
        console = Console()
        with Live(console=console, auto_refresh=False) as live:
            while self._goes_on():
                live.update(table_of(self._heading(), self._cells(), console.width), refresh=True)
                time.sleep(interval_s)
        typer.echo(ENDED)

    def _goes_on(self) -> bool:
        """Return whether the job runs, or its ranks have begun another one after a loss."""
        if self._job.is_over:
            later = [job for job in find_jobs() if set(job.pids) & set(self._job.pids)]
            if not later:
                return False
            self._follow(later[0])
        return True


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def cells_of(
    state: RankState, states: Sequence[RankState], steps: Steps, usage: Usage, now_ns: int
) -> tuple[str, ...]:
    """Return the row of a rank, as HEADINGS has it.

    Args:
        state: of the rank.
        states: of all ranks here.
        steps: of its program.
        usage: of its process.
        now_ns: by `time.monotonic_ns`.
    """
    since_s = (now_ns - steps.last_ns) / 1e9
    per_s = steps.per_s(now_ns)
    rate = "-" if per_s is None else f"{per_s:.3g}"
    since = f"{since_s:.1f} s ago" if steps.number else "-"
    memory = as_bytes(usage.own_bytes)
    if state.device_bytes:
        memory += f" + {as_bytes(state.device_bytes)} GPU"
    return (
        str(state.rank),
        str(state.pid),
        f"{steps.number:,}" if steps.number else "-",
        rate,
        since,
        memory,
        as_bytes(usage.shared_bytes),
        f"{usage.cores:.0%}",
        _doing(state, states),
    )


def _doing(state: RankState, states: Sequence[RankState]) -> str:
    """Describe what a rank does, and for how long, where it waits."""
    wait = main_wait(state)
    if wait is None:
        return "runs" if state.state == RUNS and not state.waits else activity(state, states)
    elsewhere = sorted(set(wait.members) - {each.rank for each in states})
    whom = for_whom(wait, state.rank, states)
    if elsewhere and not whom:
        whom = f" for {ranks_text(elsewhere)} on other hosts"
    return f"waits{whom}: {_in_short(wait)} ({wait.waited_s:.0f} s)"


def _in_short(wait: Wait) -> str:
    """Return the operation, the step and the line of the program: what fits beside the numbers."""
    step = re.search(r"\bstep (\d+)", wait.what)
    place = re.match(r"(.+:\d+)(?: in |$)", wait.site)
    parts = [wait.what.partition("(")[0], step and step[0], place and PurePath(place[1]).name]
    return ", ".join(part for part in parts if part)


def _in_width(row: Sequence[str], width: int) -> list[str]:
    """Return the cells of a row that are shown in so many columns of a terminal."""
    return [
        cell for heading, cell in zip(HEADINGS, row, strict=True) if width >= WIDE or heading not in WIDE_ONLY
    ]


def as_lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows below their headings as lines; all but the last column are numbers."""
    table = [_in_width(row, width) for row in (HEADINGS, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in table
    ]


def table_of(title: str, rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return it for a terminal; a rank has one line, which is cut where the terminal is too narrow."""
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 1))
    *numbers, last = _in_width(HEADINGS, width)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(last, no_wrap=True, overflow="ellipsis")
    for row in rows:
        waits = row[-1] != "runs"
        table.add_row(*map(escape, _in_width(row, width)), style="yellow" if waits else "")
    return table
