"""`PipelineShape`: how many stages, on which ranks, with which connections, for how many micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument

__all__ = ["PipelineShape", "in_blocks", "in_turn", "with_replicas"]

Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PipelineShape:
    """Ranks, stages and connections of a pipeline, for which a schedule is made.

    Attributes:
        ranks: for each stage the ranks that have it, numbered within the pipeline; several ranks are
            replicas.
        num_micro_batches: number of micro-batches of a step.
        skips: pairs of stages (from, to) with a skip connection.
        ties: for each set of tied parameters the stages that have them.
    """

    ranks: Ranks
    num_micro_batches: int
    skips: tuple[tuple[int, int], ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_positive("pipeline", "num_micro_batches", self.num_micro_batches, whole=True)
        if self.has_replicas and len({rank for ranks in self.ranks for rank in ranks}) != sum(self.replicas):
            raise InvalidArgument(
                f"pipeline: ranks={self.ranks}; where a stage has replicas, each rank has one of one stage"
            )
        for src, dst in self.skips:
            if not 0 <= src < dst < self.num_stages:
                raise InvalidArgument(f"pipeline: a skip connection goes from stage {src} to stage {dst}")

    @property
    def num_stages(self) -> int:
        """How many parts the model has."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many ranks have each stage."""
        return tuple(map(len, self.ranks))

    @property
    def has_replicas(self) -> bool:
        """Whether some stage is on several ranks."""
        return any(number > 1 for number in self.replicas)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All connections (from, to): from each stage to the next, and the skip connections."""
        chain = [(stage, stage + 1) for stage in range(self.num_stages - 1)]
        return (*chain, *(skip for skip in self.skips if skip[1] > skip[0] + 1))

    def sources(self, stage: int) -> list[int]:
        """Return the stages whose activations a stage takes."""
        return [src for src, dst in self.edges if dst == stage]

    def targets(self, stage: int) -> list[int]:
        """Return the stages that take a stage's activations."""
        return [dst for src, dst in self.edges if src == stage]

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank that computes a micro-batch: replicas take them in turn (PipeDream's 1F1B-RR)."""
        ranks = self.ranks[stage]
        return ranks[micro_batch % len(ranks)]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank has."""
        return [stage for stage, ranks in enumerate(self.ranks) if rank in ranks]

    def ranks_of_tie(self, tie: int) -> tuple[int, ...]:
        """Return the ranks that have parameters of a tie."""
        return tuple(sorted({rank for stage in self.ties[tie] for rank in self.ranks[stage]}))

    def depth(self, stage: int) -> int:
        """Return by how many forward passes 1F1B leads the backward passes, for a replica of a stage.

        It is the number of micro-batches that keeps the later stages busy: the number of ranks of later
        stages, divided by the replicas of this one. With p stages on p ranks it is p - 1 - s for stage s.
        """
        later = sum(self.replicas[stage + 1 :])
        return -(-later // self.replicas[stage])

    def micro_batches_of(self, stage: int, replica: int) -> list[int]:
        """Return the micro-batches of a step that a replica computes."""
        return list(range(replica, self.num_micro_batches, self.replicas[stage]))


def in_blocks(num_stages: int, num_ranks: int) -> Ranks:
    """Return ranks that each have some stages that follow each other, as many as the others or one less."""
    _check_enough(num_stages, num_ranks)
    return tuple((stage * num_ranks // num_stages,) for stage in range(num_stages))


def in_turn(num_stages: int, num_ranks: int) -> Ranks:
    """Return ranks that have the stages in turn: rank r has r, r + num_ranks, ... (Narayanan et al. 2021)."""
    _check_enough(num_stages, num_ranks)
    return tuple((stage % num_ranks,) for stage in range(num_stages))


def with_replicas(replicas: Sequence[int]) -> Ranks:
    """Return ranks of which the first `replicas[0]` have the first stage, the next ones the second, ..."""
    for number in replicas:
        check_positive("pipeline", "replicas", number, whole=True)
    starts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return tuple(tuple(range(start, start + number)) for start, number in zip(starts, replicas, strict=True))


def _check_enough(num_stages: int, num_ranks: int) -> None:
    check_positive("pipeline", "the number of stages", num_stages, whole=True)
    check_positive("pipeline", "the number of ranks", num_ranks, whole=True)
    if num_stages < num_ranks:
        raise InvalidArgument(
            f"pipeline: {num_stages} stages on {num_ranks} ranks; have at least as many stages as ranks, or "
            "give replicas="
        )
