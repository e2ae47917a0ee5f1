"""`Cluster`: what a step is predicted for. Plain data that a user writes, or `tune` has measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpisgd.arguments import check_count, check_flag, check_positive, check_ratio, shown
from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.network import Network, Placement, Switch

__all__ = ["Cluster", "Failures", "Link"]


@dataclass(frozen=True)
class Link:
    """What joins two ranks, or two hosts.

    Attributes:
        latency_s: from the call that sends a small message to its arrival.
        bytes_per_s: of a long one, in each direction.
        both_ways: the share of this rate that each direction has while long messages cross each other; 1 for
            full duplex. Open MPI over TCP has less, and so has memory, where collectives read what messages
            copy.
        message_s: what the processor takes for each message besides.
        cpu_s_per_byte: what sending and receiving a byte takes of a core, which cannot compute meanwhile; 0
            where the network card does it alone.
    """

    latency_s: float
    bytes_per_s: float
    both_ways: float = 1.0
    message_s: float = 0.0
    cpu_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "message_s", "cpu_s_per_byte"):
            check_not_negative("Link", name, getattr(self, name))
        check_positive("Link", "bytes_per_s", self.bytes_per_s)
        check_ratio("Link", "both_ways", self.both_ways)


@dataclass(frozen=True)
class Failures:
    """How often and how badly training is interrupted.

    Attributes:
        mtbf_hours: mean time between failures of one host.
        checkpoint_s: to write a checkpoint while the ranks wait.
        restart_s: from a failure to the first step from the last checkpoint.
        recovery_s: from a failure to the next step with the ranks that are left (`mpisgd.elastic`).
        repair_hours: until the lost host is replaced.
    """

    mtbf_hours: float
    checkpoint_s: float = 60.0
    restart_s: float = 300.0
    recovery_s: float = 5.0
    repair_hours: float = 1.0

    def __post_init__(self) -> None:
        check_positive("Failures", "mtbf_hours", self.mtbf_hours)
        for name in ("checkpoint_s", "restart_s", "recovery_s", "repair_hours"):
            check_not_negative("Failures", name, getattr(self, name))


@dataclass(frozen=True)
class Cluster:
    """Hosts of equally many ranks each, and what joins them.

    Attributes:
        hosts: how many.
        ranks_per_host: processes of the job on each, one for each GPU, or for some cores.
        between: each host's link to the others; its ranks share it.
        within: what joins the ranks of a host.
        network: how hosts are joined.
        within_is_shared: whether `within` is memory that all ranks of a host share (CPUs), or each rank has
            such a link of its own (GPUs).
        flops_per_s: of a rank in training; None: not known, as where a step was measured.
        memory_bytes_per_s: of a rank, for what only reads and writes memory: optimizers, sums.
        memory_bytes: of a rank; None: as much as it needs.
        operation_s: what an operation of a group takes beside its messages: the check that all ranks do the
            same.
        meeting_s: what an operation takes longer where the ranks have computed just before, and come to it
            unevenly: where they share cores, one waits while the other computes.
        busy_meeting_s: the same in the background, while the program computes on the same cores: what was
            asleep has to get one first.
        tensor_s: what the program takes for each gradient that it has to send, besides its bytes.
        fresh_s_per_byte: what memory takes that was allocated just before, besides: its first touch; 0 where
            an allocator keeps it.
        half_factor: by what an all-reduce of 16-bit floats on a host takes longer for each byte: a CPU adds
            them in 32 bits.
        disk_bytes_per_s: of a rank's files, where state is in them; None: not known.
        price_per_hour: of a host.
        compute_spread: standard deviation of a rank's time for a step, as a share of the mean.
        failures: None: not considered.
    """

    hosts: int
    ranks_per_host: int
    between: Link
    within: Link
    network: Network = Switch()  # noqa: RUF009  # frozen
    within_is_shared: bool = True
    flops_per_s: float | None = None
    memory_bytes_per_s: float = 1e10
    memory_bytes: float | None = None
    operation_s: float = 0.0
    meeting_s: float = 0.0
    busy_meeting_s: float = 0.0
    tensor_s: float = 0.0
    fresh_s_per_byte: float = 0.0
    half_factor: float = 1.0
    disk_bytes_per_s: float | None = None
    price_per_hour: float = 0.0
    compute_spread: float = 0.0
    failures: Failures | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host"):
            check_positive("Cluster", name, getattr(self, name), whole=True)
        for name in ("flops_per_s", "memory_bytes", "disk_bytes_per_s"):
            if getattr(self, name) is not None:
                check_positive("Cluster", name, getattr(self, name))
        for name in ("memory_bytes_per_s", "half_factor"):
            check_positive("Cluster", name, getattr(self, name))
        for name in (
            "operation_s",
            "meeting_s",
            "busy_meeting_s",
            "tensor_s",
            "fresh_s_per_byte",
            "price_per_hour",
            "compute_spread",
        ):
            check_not_negative("Cluster", name, getattr(self, name))
        check_flag("Cluster", "within_is_shared", self.within_is_shared)
        if not isinstance(self.network, Network):
            raise InvalidArgument(f"Cluster: network={shown(self.network)}; expected such as FatTree(32, 4)")
        self.network.check(self.hosts)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def placement(self) -> Placement:
        """Where the ranks are."""
        return Placement(self.hosts, self.ranks_per_host)

    @property
    def leaders(self) -> "Cluster":
        """One rank of each host: those that a host's compressor sends through."""
        return replace(self, ranks_per_host=1)

    def share(self, hosts: int, ranks_per_host: int) -> "Cluster":
        """Return a group of so many ranks, where all ranks are in such groups and these send at one time.

        The groups that have ranks on a host share its link, and its memory.
        """
        group = replace(self, hosts=hosts, ranks_per_host=ranks_per_host)
        at_a_link = self.sharers(group, "host out") if hosts > 1 else 1
        in_memory = self.sharers(group, "memory") if self.within_is_shared else 1
        between = replace(self.between, bytes_per_s=self.between.bytes_per_s / at_a_link)
        within = replace(self.within, bytes_per_s=self.within.bytes_per_s / in_memory)
        return replace(group, between=between, within=within)

    def sharers(self, group: "Cluster", level: str) -> int:
        """Return how many groups of a kind use a link of a level; of a rank's own link, one."""
        return 1 if level.startswith("rank") else max(1, self.ranks_per_host // group.ranks_per_host)

    def group_of(self, ranks: Sequence[int]) -> "Cluster":
        """Return the group of rank 0, of one of the axes of a mesh whose groups all lie as this one does."""
        hosts = len({rank // self.ranks_per_host for rank in ranks})
        return self.share(hosts, len(ranks) // hosts)

    def at(self, ranks: int) -> "Cluster":
        """Return so many ranks of it, as few hosts as they fill.

        Raises:
            InvalidArgument: they fill no whole number of hosts, or need more than there are.
        """
        check_count("plan", "ranks", ranks)
        if 0 < ranks <= self.ranks_per_host:
            return replace(self, hosts=1, ranks_per_host=ranks)
        hosts, rest = divmod(ranks, self.ranks_per_host)
        if rest or not 0 < hosts <= self.hosts:
            raise InvalidArgument(
                f"plan: {ranks} ranks; expected up to {self.ranks_per_host}, or a multiple of this up to "
                f"{self.size}, the ranks of {self.hosts} hosts"
            )
        return replace(self, hosts=hosts)


def check_not_negative(name: str, what: str, value: object) -> None:
    """Raise InvalidArgument unless `value` is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected a number, 0 or more")
