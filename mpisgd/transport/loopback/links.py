"""`Links`: how long messages between hosts take where the links are given, instead of drawn times."""

from collections import defaultdict
from dataclasses import dataclass, field

__all__ = ["Links"]


@dataclass
class Links:
    """A link of each host to a switch, which carries as much in both directions at once.

    A message waits for its rank's processor, then for its host's link out, then for the receiver's link in,
    behind the messages that came there before. On a host it takes no time.

    Attributes:
        latency_s: of a message without bytes.
        bytes_per_s: of a link, in each direction.
        message_s: what a message takes of the processor of its sender.
    """

    latency_s: float
    bytes_per_s: float
    message_s: float = 0.0
    _processors: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _out: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _in: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def arrives_s(self, now_s: float, rank: int, host: int, to_host: int, nbytes: int) -> float:
        """Return when a message arrives that a rank of a host sends now."""
        if host == to_host:
            return now_s
        ready_s = max(now_s, self._processors[rank]) + self.message_s
        self._processors[rank] = ready_s
        begins_s, bytes_s = max(ready_s, self._out[host]), nbytes / self.bytes_per_s
        self._out[host] = begins_s + bytes_s
        # The first byte is there after the latency, and the last when all before it are.
        self._in[to_host] = max(begins_s + self.latency_s, self._in[to_host]) + bytes_s
        return self._in[to_host]
