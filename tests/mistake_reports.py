"""What tests/launch/programs/mistakes.py says of its mistakes, however it was started."""

from __future__ import annotations

import json
import re
import subprocess

__all__ = ["check_reports"]

LIMIT_S = 10.0


def check_reports(done: subprocess.CompletedProcess[str], size: int) -> None:
    """The table was gone through to its end, and every rank got what it should in time."""
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [
        f"{report['mistake']}, rank {rank}: {problem or f'took {seconds:.1f} s'}"
        for report in reports
        for rank, (_, problem, seconds) in enumerate(report["ranks"])
        if problem or seconds > LIMIT_S
    ]
    assert not wrong, "\n".join(wrong)
    assert done.returncode == 0, done.stderr
    # Python names a category, as in ResourceWarning; the launcher writes "Warning" of its own children.
    assert not re.search(r"\w+Warning", done.stderr), done.stderr
    assert len(reports) >= 50
    assert all(len(report["ranks"]) == size for report in reports)
