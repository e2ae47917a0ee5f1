"""`UnevenData`: ranks that have no more data take part in what the others do, until nobody has any.

Whatever all ranks must do together is an *act*: to reduce gradients, to step, to clip. A rank that has data
tells the others of each act before it does it. A rank that has none receives the name of the act, and
performs it with nothing to contribute:

    rank 0   sends "reduce", reduces     sends "step", steps        ...   no more data: ends the block
    rank 1   (no more data)  receives "reduce", reduces zeros     receives "step", steps    ...   ends it

What is communicated outside of an act would find some ranks without the others, so it is refused, whether or
not a rank has run out of data yet.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mpisgd.arguments import ranks_text
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.owner import owned_by
from mpisgd.errors import CollectiveMismatch, DataExhausted, InvalidArgument

__all__ = ["Performer", "Told", "UnevenData", "acting", "performs", "refuse"]

HAS_DATA, IS_GIVEN = 1, 2  # bits of what a rank tells; from NOTE on they are those of the act
NOTE = 4
NOTHING = "takes part without data of its own"


class Told(NamedTuple):
    """What the ranks have told each other before an act; the same on all of them.

    Attributes:
        examples: of each rank's batch, by place in the group; 0: it has no more data.
        notes: of each rank, bits of the act's own.
        first: the place of the first rank that has data.
        is_given: whether the program says how many examples there are.
    """

    examples: tuple[int, ...]
    notes: tuple[int, ...]
    first: int
    is_given: bool

    @property
    def is_short(self) -> bool:
        """Whether some rank has no more data."""
        return 0 in self.examples

    def share(self, place: int) -> float:
        """Return the factor of a rank's part in a mean over all ranks."""
        return float(Fraction(self.examples[place] * len(self.examples), sum(self.examples)))

    def noted(self, bit: int) -> list[int]:
        """Return the places of the ranks that have noted a bit."""
        return [place for place, notes in enumerate(self.notes) if notes & bit]


Performer = Callable[..., Any]  # takes `Told`, the detail, and what names the act further
P = TypeVar("P", bound=Performer)
_performers: dict[str, Performer] = {}  # of acts that are no optimizer's


def performs(name: str) -> Callable[[P], P]:
    """Decorate what a rank without data does for an act that is no optimizer's, with the act's key."""

    def register(performer: P) -> P:
        _performers[name] = performer
        return performer

    return register


class AddingUp(Protocol):
    """A sum over the ranks, as a part of an operation in the queue."""

    def begin(self) -> None:
        """Do what comes before the operation's consistency check."""

    def run(self) -> None:
        """Do the rest."""


class UnevenData:
    """What the ranks of a group agree on while some may run out of data.

    Args:
        group: the ranks.
        performers: what a rank without data does for each act of the optimizers, by its name.
        add_up: returns what adds up a flat tensor over the ranks, as a part of an operation.
        throws: whether all ranks raise as soon as one has no more data.

    Attributes:
        group: as given.
        performers: as given.
        examples: of this rank's batch.
        is_given: whether the program has said how many these are.
        has_data: whether this rank has data.
        num_passes: backward passes of this rank.
        num_examples: of all of them.
        latest_examples: of the latest one.
        last: what was told before the latest act.
        names: by the id of a parameter, how ranks name it to each other: its optimizer's number, its place.
    """

    def __init__(
        self,
        group: Group,
        performers: Mapping[str, Performer],
        add_up: Callable[[Tensor], AddingUp],
        *,
        throws: bool,
    ) -> None:
        self._add_up = add_up
        self.group = group
        self.performers = dict(performers)
        self.examples, self.is_given = 1, False
        self.has_data = True
        self.num_passes = self.num_examples = self.latest_examples = 0
        self._backward = -1  # the latest one, by its number
        self.last: Told | None = None
        self.names: dict[int, tuple[int, int]] = {}
        self._throws = throws
        self._depth = 0  # of acts that this rank is in

    def install(self) -> None:
        """Watch what the groups of the job communicate from now on."""
        for group in self._groups():
            group.queue.uneven = self

    def remove(self) -> None:
        """Watch nothing any more."""
        for group in self._groups():
            group.queue.uneven = None

    def _groups(self) -> list[Group]:
        return [group for group in self.group.job.groups if group.is_usable]

    def note_backward(self, number: int) -> None:
        """Count a backward pass over this rank's batch; it may have reached several optimizers."""
        if number != self._backward:
            self._backward = number
            self.num_passes += 1
            self.num_examples += self.examples
            self.latest_examples = self.examples

    # -- of a rank that has data --------------------------------------------------------------------

    @contextlib.contextmanager
    def act(
        self, name: str, *key: Any, detail: Callable[[], Any] = lambda: None, note: int = 0
    ) -> Iterator[Told | None]:
        """Do inside what all ranks do together, after the others have been told. Collective.

        Args:
            name: of the act.
            key: what names it further, the same on all ranks that have data; compared by its `repr`.
            detail: returns what ranks without data need beside it, from the first rank that has some.
            note: bits, which each rank has of its own.

        Returns:
            What was told; None inside of another act, or on a rank without data.

        Raises:
            CollectiveMismatch: ranks that have data are about to do different things; raised on all.
            DataExhausted: a rank has no more data, where that is an error; raised on all.
            InvalidArgument: some ranks say how many examples they have, and others do not; raised on all.
        """
        told = self._tell(name, key, detail, note) if self.has_data and not self._depth else None
        self._depth += 1
        try:
            yield told
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Let the program do inside what it may do outside of an act: in a closure that a step calls."""
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth

    def intercept(self, kind: str) -> None:
        """Raise where something is communicated outside of an act.

        Raises:
            InvalidArgument: on all ranks that have data, which come to the same.
        """
        if not self._depth:
            refuse(kind, "ranks that have no more data cannot take part; call it after the `with` block")

    def is_of(self, group: Group) -> bool:
        """Return whether a group has the same ranks."""
        return sorted(group.ranks) == sorted(self.group.ranks)

    def _tell(self, name: str, key: Sequence[Any], detail: Callable[[], Any], note: int) -> Told:
        told, _ = self._exchange((name, tuple(key)), detail, note)
        assert told is not None
        return told

    # -- of a rank that has none --------------------------------------------------------------------

    def follow(self, until: str = "") -> Any:
        """Perform what the others do: until nobody has data, or an act of a name has been performed.

        Returns:
            What performing that act has returned.
        """
        self.has_data = False
        while True:
            told, received = self._exchange(None, lambda: None, 0)
            if told is None:
                return None
            (name, key), detail = received
            self._depth += 1
            try:
                perform = self.performers.get(name)
                result = _shared(name)(self, *key) if perform is None else perform(told, detail, *key)
            finally:
                self._depth -= 1
            if name == until:
                return result

    def group_like(self, ranks: tuple[int, ...], ordinal: int) -> Group:
        """Return the group of this rank that others have named.

        Raises:
            InvalidArgument: there is none.
        """
        found = [each for each in self._groups() if each.ranks == ranks and each.ordinal == ordinal]
        if not found:
            refuse(f"a collective of the ranks {list(ranks)}", "this rank has no such group")
        return found[0]

    # -- between them -------------------------------------------------------------------------------

    def gather(self, mine: Sequence[int], what: str = "numbers of all ranks") -> list[list[int]]:
        """Return the numbers of all ranks, in the group's order. Collective; inside an act."""
        rows = torch.zeros(self.group.size, len(mine), dtype=torch.int64)
        rows[self.group.rank] = torch.tensor(list(mine), dtype=torch.int64)
        sum_of_rows = self._add_up(rows.view(-1))
        self._depth += 1
        try:
            with owned_by(None):  # a rank without data is in no optimizer's step
                self.group.queue.run(Operation("join", extra=what), sum_of_rows.run, before=sum_of_rows.begin)
        finally:
            self._depth -= 1
        numbers: list[list[int]] = rows.tolist()
        return numbers

    def _exchange(
        self, mine: tuple[str, tuple[Any, ...]] | None, detail: Callable[[], Any], note: int
    ) -> tuple[Told | None, Any]:
        """Tell each other what comes next; return it with the act and its detail. Collective.

        Args:
            mine: what this rank is about to do; None: it has no more data.
            detail: see `act`, as for `note`.

        Returns:
            None where nobody has data. The act is told where some rank has none.
        """
        bits = 0 if mine is None else HAS_DATA | (IS_GIVEN if self.is_given else 0) | note * NOTE
        digest = 0 if mine is None else _digest(mine)
        table = self.gather([bits, digest, self.examples if mine is not None else 0], "what comes next")
        active = [place for place, row in enumerate(table) if row[0] & HAS_DATA]
        if not active:
            return None, None
        self._check(table, active, mine)
        found = Told(
            examples=tuple(row[2] for row in table),
            notes=tuple(row[0] // NOTE for row in table),
            first=active[0],
            is_given=bool(table[active[0]][0] & IS_GIVEN),
        )
        self.last = found
        return found, self._passed_on((mine, detail), active[0]) if found.is_short else None

    def _check(self, table: Sequence[Sequence[int]], active: Sequence[int], mine: Any) -> None:
        if self._throws and len(active) < len(table):
            ended = [self.group.ranks[place] for place in range(len(table)) if place not in active]
            has = "has" if len(ended) == 1 else "have"
            raise DataExhausted(
                f"join: {ranks_text(ended)} of group '{self.group.name}' {has} no more data, and "
                "throw_on_early_termination=True"
            )
        if len({table[place][0] & IS_GIVEN for place in active}) > 1:
            given = [self.group.ranks[place] for place in active if table[place][0] & IS_GIVEN]
            refuse(
                "a batch",
                f"{ranks_text(given)} said how many examples it has, and others did not; call next_batch() "
                "on all ranks, or on none",
            )
        if len({table[place][1] for place in active}) > 1:
            texts = self.gather_objects(NOTHING if mine is None else _text(mine))
            lines = [f"  rank {rank}: {text}" for rank, text in zip(self.group.ranks, texts, strict=True)]
            raise CollectiveMismatch(
                f"inside join() the ranks of group '{self.group.name}' that have data must do the same:\n"
                + "\n".join(lines)
            )

    def _passed_on(self, mine: tuple[Any, Callable[[], Any]], first: int) -> Any:
        """Broadcast the next act of the first rank that has data, with its detail. Collective."""
        act, detail = mine
        return self.gather_objects((act, detail()) if self.group.rank == first else None)[first]

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in the group's order. Collective."""
        everyones: list[Any] = []
        queue = self.group.queue
        self._depth += 1
        try:
            with owned_by(None):
                queue.run(
                    Operation("join", extra="what it is"),
                    lambda: everyones.extend(queue.communicator.all_gather_object(mine)),
                )
        finally:
            self._depth -= 1
        return everyones


def _shared(name: str) -> Performer:
    if name not in _performers:
        refuse(name, "this rank has nothing of the kind: run one program on all ranks")
    return _performers[name]


def _digest(act: Any) -> int:
    told = hashlib.blake2b(repr(act).encode(), digest_size=7).digest()
    return int.from_bytes(told, "little")


def _text(act: tuple[str, tuple[Any, ...]]) -> str:
    name, key = act
    return f"{name}({', '.join(map(repr, key))})"


def acting(group: Group, name: str, *key: Any) -> contextlib.AbstractContextManager[Told | None]:
    """Return a context that tells ranks without data of an act; an empty one outside of `join()`."""
    data: UnevenData | None = group.queue.uneven
    if data is None:
        return contextlib.nullcontext()
    if not data.is_of(group):
        data.intercept(f"{name} in group '{group.name}', which has other ranks,")
    return data.act(name, *key)


def refuse(what: str, why: str) -> None:
    """Raise what all ranks that have data raise."""
    error = InvalidArgument(f"join: {what} does not go inside join(): {why}")
    error.on_every_rank = True
    raise error
