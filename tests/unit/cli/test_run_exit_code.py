"""The exit code of `run` where mpirun's is not that of the program."""

import pytest

from mpisgd.config import ENDED_NOTE, JOINED_NOTE, LEFT_NOTE, PREEMPTED, PREEMPTED_NOTE
from mpisgd.tools.cli.run import _code_of_program

IN_ORDER, CUT_SHORT = [JOINED_NOTE, "checkpoint a", LEFT_NOTE], [JOINED_NOTE, "checkpoint a"]
SAVED = [*CUT_SHORT, PREEMPTED_NOTE, LEFT_NOTE]


@pytest.mark.parametrize(
    ("code", "lines", "wanted"),
    [
        (0, [], 0),  # a program without mpisgd
        (0, IN_ORDER, 0),
        (0, CUT_SHORT, 1),  # Open MPI 5.0.11 under Slurm, whose SIGTERM has ended mpirun's daemons
        (0, CUT_SHORT + IN_ORDER, 0),
        (0, IN_ORDER + CUT_SHORT, 1),
        (0, SAVED, PREEMPTED),
        (0, SAVED + IN_ORDER, 0),
        (3, CUT_SHORT, 3),
        (137, CUT_SHORT, 137),
        (137, [*CUT_SHORT, ENDED_NOTE, LEFT_NOTE], 0),
    ],
)
def test_a_program_that_was_cut_short_has_failed(code, lines, wanted):
    assert _code_of_program(code, lines) == wanted
