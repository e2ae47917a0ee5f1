"""`Cost`: seconds as a line over bytes; `Costs`: as the largest of some lines."""

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Cost", "Costs", "upper_lines"]

SAME = 1e-9  # lines as near to each other are one
MOST_BYTES = 1e13


class Cost(NamedTuple):
    """Something of n bytes takes alpha_s + beta_s_per_byte n seconds."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of `nbytes`; 0 for none."""
        return self.alpha_s + self.beta_s_per_byte * nbytes if nbytes else 0.0


class Costs(NamedTuple):
    """What a collective takes by its size: that of its lines which is most."""

    lines: tuple[Cost, ...]

    def at(self, nbytes: float) -> Cost:
        """Return the line that counts for so many bytes."""
        return max(self.lines, key=lambda line: line.alpha_s + line.beta_s_per_byte * nbytes)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of `nbytes`; 0 for none."""
        return self.at(nbytes).seconds(nbytes)


def upper_lines(line_at: Callable[[float], Cost]) -> Costs:
    """Return the lines of a maximum of lines, each of which `line_at` gives where it counts.

    Where two of them cross there may be a third above: it is asked for there, and so on.
    """
    found = {line_at(1e-9), line_at(MOST_BYTES)}
    asked = [tuple(sorted(found))] if len(found) > 1 else []
    while asked:
        low, high = asked.pop()
        bytes_at = (high.alpha_s - low.alpha_s) / max(1e-300, low.beta_s_per_byte - high.beta_s_per_byte)
        if not 0.0 < bytes_at < MOST_BYTES:
            continue
        line = line_at(bytes_at)
        if line.seconds(bytes_at) > low.seconds(bytes_at) * (1 + SAME):
            found.add(line)
            asked += [(low, line), (line, high)]
    return Costs(tuple(sorted(found)))
