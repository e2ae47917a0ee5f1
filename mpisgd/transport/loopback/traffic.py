"""`Traffic`: what a rank of a run has sent, and what MPI's collectives have moved for it."""

from dataclasses import dataclass, field

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """Counts of one rank, over all its communicators, since the run began.

    Attributes:
        messages: that it has sent.
        message_bytes: their payload.
        calls: of MPI's collectives, among them those that make and free communicators.
        call_bytes: what these took from it, and what they gave to it.
        partners: the ranks of the job that it has sent messages to.
    """

    messages: int = 0
    message_bytes: int = 0
    calls: int = 0
    call_bytes: int = 0
    partners: set[int] = field(default_factory=set)

    def send(self, rank: int, nbytes: int) -> None:
        """Count a message to a rank."""
        self.messages += 1
        self.message_bytes += nbytes
        self.partners.add(rank)

    def call(self) -> None:
        """Count a call of one of MPI's collectives."""
        self.calls += 1

    def move(self, nbytes: int) -> None:
        """Count what such a call takes or gives."""
        self.call_bytes += nbytes
