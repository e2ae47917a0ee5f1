"""`NoticeFilter`: what a launcher writes on stderr, without the notices that follow an error of ours.

When a rank ends the job after an error, Open MPI frames two notices between lines of dashes: that MPI_ABORT
was invoked, and which process did. They say nothing that the error does not say, and may come before it. It
ends them with a zero byte, which is dropped, too. All else is passed on as it comes, unfinished lines
included.
"""

__all__ = ["NoticeFilter"]

RULE = b"-" * 74 + b"\n"
DROPPED = (b"MPI_ABORT was invoked on rank ", b"prterun has exited due to process rank ")
MOST_LINES = 12  # of a notice
# The second notice is also about other ends; those are passed on.
ABORTED = b'"abort"'


class NoticeFilter:
    """Takes what a launcher writes, in pieces of any size, and returns what is to be shown."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []  # a notice that has begun
        self._rest = b""  # an unfinished line that may be a part of one

    def feed(self, data: bytes) -> bytes:
        """Return the text that can be shown by now."""
        *lines, rest = (self._rest + data.replace(b"\0", b"")).split(b"\n")
        shown = b"".join(self._take(line + b"\n") for line in lines)
        begins = self._lines or RULE.startswith(rest)
        self._rest = rest if begins else b""
        return shown if begins else shown + rest

    def close(self) -> bytes:
        """Return the rest of the text at the end."""
        return self._release() + self._rest

    def _take(self, line: bytes) -> bytes:
        if not self._lines:
            if line != RULE:
                return line
            self._lines = [line]
            return b""
        self._lines.append(line)
        if line == RULE and self._is_dropped():
            self._lines = []
            return b""
        goes_on = self._lines[1].startswith(DROPPED) and line != RULE and len(self._lines) < MOST_LINES
        return b"" if goes_on else self._release()

    def _is_dropped(self) -> bool:
        text = b"".join(self._lines[1:-1])
        return text.startswith(DROPPED[0]) or (text.startswith(DROPPED[1]) and ABORTED in text)

    def _release(self) -> bytes:
        lines, self._lines = self._lines, []
        return b"".join(lines)
