"""What a launcher writes is passed on, but for its notices of an MPI_Abort."""

from __future__ import annotations

import pytest

from mpisgd.tools.cli.supervision import MOST_LINES, RULE, NoticeFilter

ABORT = b"""%sMPI_ABORT was invoked on rank 1 in communicator MPI COMM 3 DUP FROM 0
  Proc: [[42477,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
%s""" % (RULE, RULE)
ENDED = b"""%sprterun has exited due to process rank 0 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
%s""" % (RULE, RULE)
KILLED = b"""%sprterun noticed that process rank 1 with PID 7 on node vm exited on
signal 9 (Killed).
%s""" % (RULE, RULE)
OTHER_END = ENDED.replace(b'"abort"', b'"finalize"')
ERROR = b"mpisgd: rank 1 of 3 on vm raised, the job ends:\nValueError: x\n"


def shown(text: bytes, size: int) -> bytes:
    notices = NoticeFilter()
    pieces = [notices.feed(text[i : i + size]) for i in range(0, len(text), size)]
    return b"".join(pieces) + notices.close()


@pytest.mark.parametrize("size", [1, 7, 80, 10_000])
@pytest.mark.parametrize(
    ("text", "left"),
    [
        (ERROR + ABORT + ENDED, ERROR),
        (ABORT + ERROR + ENDED, ERROR),
        (ERROR + ABORT + ENDED + b"\0", ERROR),  # the output was "binary" for grep
        (ERROR + KILLED, ERROR + KILLED),
        (OTHER_END, OTHER_END),
        (RULE + b"epoch 1\n" + RULE + b"end", RULE + b"epoch 1\n" + RULE + b"end"),
        (RULE + RULE + b"-- x", RULE + RULE + b"-- x"),
        (ABORT[:-10], ABORT[:-10]),
        (RULE + b"MPI_ABORT was invoked on rank 0\n" + b"\n" * MOST_LINES,) * 2,
    ],
)
def test_only_notices_of_an_abort_are_left_out(text, left, size):
    assert shown(text, size) == left


def test_an_unfinished_line_is_shown_at_once():
    assert NoticeFilter().feed(b"loss 0.5\r") == b"loss 0.5\r"
    assert NoticeFilter().feed(b"") == b""
