"""`Owners`: the ranks that divide parameters among themselves, and how each gets what the others own.

Between hosts nothing travels twice to the same host. An owner sends what it has to one rank of every other
host, its counterpart there, and the ranks of a host read from each other's memory what has come in:

    host 0   ranks 0 1 2     owner 0 sends to 3, owner 1 to 4, owner 2 to 3
    host 1   ranks 3 4       owner 3 sends to 0, owner 4 to 1

Partial sums go the other way: a counterpart adds up what the ranks of its host have for an owner elsewhere.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from mpisgd.accelerator.buffers import in_order
from mpisgd.collectives.dispatch import link_of
from mpisgd.core.group import Group
from mpisgd.interfaces.host_transport import HostMemory
from mpisgd.memory_ranges import Span, consecutive_spans, range_of
from mpisgd.transport.messages.link import Parts, Transfer, frames

__all__ = ["Buffers", "Owners", "Pack", "Transfers"]

PARTS_UNDER_WAY = 3

Buffers = Sequence[Sequence[Tensor]]  # of each owner
# Returns what travels of buffers, of the owners that this rank is or represents, and what fills them then.
Pack = Callable[[Buffers], tuple[Buffers, Callable[[], None]]]


class Transfers:
    """What is under way between hosts; where something fails, the rest is left alone, and its memory kept."""

    def __init__(self) -> None:
        self._begun: list[Transfer] = []

    def note(self, transfer: Transfer) -> Transfer:
        """Take care of a transfer."""
        self._begun.append(transfer)
        return transfer

    def __enter__(self) -> "Transfers":
        return self

    def __exit__(self, *_: object) -> None:
        for transfer in self._begun:
            transfer.abandon()


class Owners:
    """The owners are numbered from 0, in the order of their ranks.

    Args:
        group: the ranks that train together.
        of_host: whether the ranks of each host divide everything, and hosts do the same work; otherwise all
            ranks of the group do.

    Attributes:
        group: as given.
        memory: the shared memory of this host's ranks; None where there is none.
        nodes: the owners on each host; a rank without shared memory counts as a host of its own.
        rank: the number of this one.
        ranks: of all owners in the group.
        once: the ranks of the group whose parts are everything, once.
    """

    def __init__(self, group: Group, *, of_host: bool) -> None:
        self.group = group
        self.memory = group.host_memory
        shares = group.shares_memory
        topology = group.known_topology
        here: Sequence[int] = topology.nodes[topology.node_rank] if self.memory is not None else (group.rank,)
        if of_host:
            self.rank, self.ranks = here.index(group.rank), here
            self.nodes: tuple[tuple[int, ...], ...] = (tuple(range(len(here))),)
            self.once: Sequence[int] = topology.nodes[0] if shares else (0,)
        else:
            self.rank, self.ranks = group.rank, range(group.size)
            self.nodes = topology.nodes if shares else tuple((rank,) for rank in range(group.size))
            self.once = range(group.size)
        self.of_host = of_host

    @property
    def size(self) -> int:
        """How many there are."""
        return sum(map(len, self.nodes))

    @cached_property
    def host(self) -> int:
        """The number of this rank's host among `nodes`."""
        return next(i for i, owners in enumerate(self.nodes) if self.rank in owners)

    @property
    def here(self) -> tuple[int, ...]:
        """The owners on this host, in the order of their local ranks."""
        return self.nodes[self.host]

    def counterpart(self, owner: int, host: int) -> int:
        """Return who sends and receives for an owner on a host: the owner itself on its own."""
        local = next(owners.index(owner) for owners in self.nodes if owner in owners)
        there = self.nodes[host]
        return owner if owner in there else there[local % len(there)]

    @cached_property
    def represented(self) -> list[list[int]]:
        """For each owner on this host: itself, and those elsewhere of which it is the counterpart here."""
        others = [owner for i, owners in enumerate(self.nodes) if i != self.host for owner in owners]
        speaks_for = {owner: self.counterpart(owner, self.host) for owner in others}
        return [[mine, *(owner for owner in others if speaks_for[owner] == mine)] for mine in self.here]

    @property
    def mine(self) -> list[int]:
        """This rank, and the owners elsewhere of which it is the counterpart here."""
        return self.represented[self.here.index(self.rank)]

    # -- inside the queue ---------------------------------------------------------------------------

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object."""
        if not self.of_host:
            return list(self.group.queue.communicator.all_gather_object(obj))
        return [obj] if self.memory is None else self.memory.all_gather_object(obj)

    def exchange(self, buffers: Buffers, *, one_copy: bool = False) -> None:
        """Fill everyone's `buffers[r]` with what the r-th owner has there.

        Args:
            buffers: for each owner contiguous CPU tensors, of the same sizes on all ranks.
            one_copy: whether `buffers` are the same memory for all ranks of a host.

        Cost: with h hosts, an owner sends what it has h - 1 times; on a host every rank writes what it has
            and what came in for it, and reads the rest, through the staging memory.
        """
        self.exchange_in_turn([[[in_order(t) for t in of_one] for of_one in buffers]], one_copy=one_copy)

    def exchange_in_turn(
        self, parts: Iterable[Buffers], *, one_copy: bool = False, pack: Pack | None = None
    ) -> None:
        """Do the same for several parts: messages of the next ones travel while one goes round the host.

        Args:
            parts: of tensors [n], which are not looked at any further. Each is asked for when those before
                it are on their way.
            one_copy: see `exchange`.
            pack: what travels between hosts instead of the tensors; None: they do.
        """
        with Transfers() as transfers:
            under_way: deque[tuple[Buffers, Transfer | None, Callable[[], None]]] = deque()
            for flats in parts:
                begun, unpack = None, _nothing
                if len(self.nodes) > 1:
                    packed, unpack = (flats, _nothing) if pack is None else pack(flats)
                    begun = transfers.note(self._begin_between_hosts(packed))
                under_way.append((flats, begun, unpack))
                if len(under_way) == PARTS_UNDER_WAY:
                    self._arrive(*under_way.popleft(), one_copy=one_copy)
            while under_way:
                self._arrive(*under_way.popleft(), one_copy=one_copy)
        if one_copy and self.memory is not None:
            self.memory.barrier()

    def _arrive(
        self, flats: Buffers, transfer: Transfer | None, unpack: Callable[[], None], *, one_copy: bool
    ) -> None:
        if transfer is not None:
            transfer.wait()
        unpack()
        if self.memory is not None and len(self.here) > 1 and not one_copy:
            self._exchange_here(flats, self.memory)

    def _begin_between_hosts(self, flats: Buffers) -> Transfer:
        sends = [
            (self.counterpart(self.rank, host), tensor)
            for host in range(len(self.nodes))
            if host != self.host
            for tensor in flats[self.rank]
        ]
        receives = [(owner, tensor) for owner in self.mine[1:] for tensor in flats[owner]]
        return self.begin(sends, receives)

    def begin(self, sends: Parts, receives: Parts) -> Transfer:
        """Begin to send and receive tensors between hosts, in pieces that take turns well."""
        return link_of(self.group, "exchange of shards").start(
            [(dst, frame) for dst, tensor in sends for frame in frames(tensor)],
            [(src, frame) for src, tensor in receives for frame in frames(tensor)],
        )

    def _exchange_here(self, flats: Buffers, memory: HostMemory) -> None:
        streams = [
            consecutive_spans([range_of(flat) for owner in owners for flat in flats[owner]], local)
            for local, owners in enumerate(self.represented)
        ]
        takes = [span for local, stream in enumerate(streams) if local != memory.rank for span in stream]
        memory.run_steps(memory.exchange_spans(streams[memory.rank], takes, max(map(_length, streams))))


def _nothing() -> None:
    """Do nothing."""


def _length(stream: Sequence[Span]) -> int:
    return stream[-1].start + stream[-1].nbytes if stream else 0
