"""What costs are written with: the operations of a step, what they are of, and the ranks.

A `cost.py` says what a method does in a step, by sizes alone, as a stream of operations in the order of
the program. Nothing is computed and nothing is sent: three interpreters read the stream.

    def cost(method, sizes, world, step) -> Iterator[Op]     # step 0: what is there before the first one
    def cycle(method, world) -> Cycle                        # which steps stand for all, if that is not found

    methods/wire_bytes.py         bytes that a rank sends
    methods/peak_memory.py        bytes that a rank keeps at the moment at which they are most
    plan/steps/step_time.py       seconds, on a cluster

Two things go on at the same time: the program, and the queue of the group. A stream is both, merged:

    Compute   forward, backward or the optimizer, or a share of it; in the queue, a compressor
    Move      the program reads and writes so many bytes of memory
    Check     an operation of the group begins: all ranks do the same
    Collective   an all-reduce or another one, over all ranks, a host's, or one of each host; in the queue
    Send      the program sends a message to another rank, and goes on
    Wait      the program goes on when the queue is done, or one collective of it, or a message has come
    Alloc, Free  memory, by what it is for: a field of `peak_memory.Memory`
    Disk      the program reads or writes files

The program's operations follow each other, and so do the queue's. One of the queue begins when the program
has come to it; the program waits for the queue at a `Wait` only. `after` is for other edges, as where
parameters are gathered ahead. What is begun in one step may be waited for in a later one, by its `key`. Local
SGD, which averages every H steps, in full:

    def cost(method, sizes, world, step):
        yield from unsent_step(sizes)                        # forward, backward, optimizer
        if step and step % method.sync_every == 0:
            yield from mean_of_parameters(sizes, world, step)

A compressor's cost is what it makes of one bucket: its bytes, and the memory for it. A method is given it as
`world.wire`: `yield from world.wire.cost(bucket, world, step)`.

A stream knows no seconds, no links and no algorithms, and neither where buckets end: that is the planner's,
which cuts them and decides `world.overlaps`. Every rank does the same, so there is one stream; of a
pipeline, `mpisgd/pipeline/cost.py`, each rank has its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mpisgd.methods.model_sizes import Bucket, Parameter, Sizes

__all__ = [
    "ALL",
    "CONTEXT",
    "HOST",
    "LEADERS",
    "REPLICAS",
    "TENSOR",
    "Alloc",
    "Bucket",
    "Check",
    "Collective",
    "Compute",
    "Cycle",
    "Disk",
    "Free",
    "Move",
    "Op",
    "Parameter",
    "Send",
    "Sizes",
    "Wait",
    "Wire",
    "World",
]

ALL, HOST, LEADERS = "all", "host", "leaders"  # groups: all ranks; those of a host; the first of each host
# Of layouts: ranks that divide the tensors of the same layers; those that have the same parameters; those of
# which each has a part of the same sequences.
TENSOR, REPLICAS, CONTEXT = "tensor", "replicas", "context"


# -- operations ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """An operation.

    Attributes:
        after: operations of the other side that must have ended; those before on its own side have anyway.
            None: for one of the queue, what the program has done so far, as the program begins it.
    """

    after: tuple["Op", ...] | None = None


@dataclass(frozen=True, eq=False)
class Compute(Op):
    """The program computes, or a compressor in the queue.

    Attributes:
        what: "forward", "backward", "forward, backward", "optimizer", "compress"; of a layout, "products".
        share: of what the step takes for that without communication.
        bucket: forward: of these parameters; backward: until these gradients are complete. None: of all, and
            the rest.
        elements: "compress": how many.
        arrived_bytes: "compress": of other ranks' messages that are decompressed.
        num_collectives: "compress": how many follow, each after a part of it.
        by: "compress": the compressor.
        element_s: "compress": estimated seconds of an element on a core whose memory has 10 GB/s.
        stage: of a pipeline, which computes a micro-batch or updates.
        operations: "products": multiplications and additions.
    """

    what: str
    share: float = 1.0
    bucket: "Bucket | None" = None
    elements: int = 0
    arrived_bytes: float = 0.0
    num_collectives: int = 0
    by: Any = None
    element_s: float = 0.0
    stage: int = -1
    operations: int = 0


@dataclass(frozen=True, eq=False)
class Move(Op):
    """The program reads and writes memory.

    Attributes:
        nbytes: together.
        what: for timelines.
        fresh_bytes: of them, in memory that was allocated for it.
        tensors: how many there are.
    """

    nbytes: float
    what: str = "copy"
    fresh_bytes: float = 0.0
    tensors: int = 0


@dataclass(frozen=True, eq=False)
class Check(Op):
    """An operation of a group begins, which the collectives after it belong to."""

    group: str = ALL
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Collective(Op):
    """Something that ranks do together, in the queue.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all"; "exchange" with neighbours; "pairs":
            likewise, in the background and at the most; "access": of memory that all ranks hold a part of; or
            "rotate": each rank's part passes all others in a ring, while these compute.
        nbytes: of what it is about: all_gather, rotate: of what everyone has in the end; all_to_all: of what
            a rank has for all; exchange: of a message.
        group: who.
        itemsize: of what is added up; 0: nothing is.
        key: for a `Wait` in another step.
        graph: exchange: the `mpisgd.gossip.Graph`.
        phase: exchange: the step of the graph.
        meets: whether ranks wait for each other in it.
        num_ranks: of the group; 0: `group` says it.
        ranks: of a layout, those of rank 0's group.
    """

    kind: str
    nbytes: float
    group: str = ALL
    itemsize: int = 0
    key: str = ""
    graph: Any = None
    phase: int = 0
    meets: bool = True
    num_ranks: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Send(Op):
    """A message of the program, which does not wait until it is through.

    Attributes:
        nbytes: of it.
        dst: the rank that it goes to.
        key: for that rank's `Wait`.
    """

    nbytes: float
    dst: int
    key: str


@dataclass(frozen=True, eq=False)
class Wait(Op):
    """The program goes on when a message or the last collective of this key is done; "": when all are."""

    key: str = ""


@dataclass(frozen=True, eq=False)
class Alloc(Op):
    """Memory is taken for something, which is a field of `peak_memory.Memory`."""

    what: str
    nbytes: float


@dataclass(frozen=True, eq=False)
class Free(Op):
    """Memory for something is let go of."""

    what: str
    nbytes: float


@dataclass(frozen=True, eq=False)
class Disk(Op):
    """The program reads or writes so many bytes of files; what follows needs them."""

    nbytes: float


# -- the ranks ------------------------------------------------------------------------------------------


class Wire(Protocol):
    """What travels instead of tensors: the cost of a compressor.

    Attributes:
        warmup_steps: after so many steps every one costs the same.
    """

    @property
    def warmup_steps(self) -> int:
        """See above."""

    def changes(self, itemsize: int) -> bool:
        """Return whether floats of so many bytes travel as something else."""

    def cast_itemsize(self, itemsize: int) -> int | None:
        """Return as how many bytes they travel if a cast is all that happens to them, else None."""

    def cost(self, bucket: Bucket, world: "World", step: int) -> Iterator[Op]:
        """Yield what becomes of a bucket: its mean, as far as the wire lets it."""

    def exchange(self, bucket: Bucket, world: "World", graph: Any, phase: int) -> Iterator[Op]:
        """Yield what becomes of a bucket's message to neighbours, who add up what it stands for."""

    def kept_bytes(self, bucket: Bucket, world: "World") -> float:
        """Return the bytes that it keeps of a bucket from step to step."""


class World(NamedTuple):
    """The ranks.

    Attributes:
        hosts: of equally many ranks each.
        ranks_per_host: see above.
        wire: what travels.
        overlaps: whether gradients are sent while backward computes others.
        shares: whether parameters lie in memory that the ranks of a host share.
        group: of whom collectives are.
    """

    hosts: int
    ranks_per_host: int
    wire: Wire
    overlaps: bool = False
    shares: bool = False
    group: str = ALL

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def leaders(self) -> "World":
        """The first ranks of all hosts."""
        return self._replace(ranks_per_host=1, group=LEADERS)

    def size_of(self, group: str) -> int:
        """Return the number of ranks of a group."""
        return {ALL: self.size, HOST: self.ranks_per_host, LEADERS: self.hosts}[group]


class Cycle(NamedTuple):
    """Which steps stand for all: `length` of them, after the `first`."""

    first: int = 0
    length: int = 1
