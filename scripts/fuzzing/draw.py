"""`draw`: a program from a seed. The same seed gives the same program on every machine.

Most of what is drawn is allowed; what mpisgd refuses is counted, and what `contract` forbids is drawn again.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from fuzzing.choices import (
    CASTS,
    CLOSURE_OPTIMIZERS,
    COMPRESSORS,
    EMPTY,
    EXACT_OPTIMIZERS,
    HALVES,
    LARGE,
    LOCAL,
    ONE_BIT_OPTIMIZERS,
    SHAPES,
    SHARDED,
    SMOOTH_OPTIMIZERS,
    SPARSE_OPTIMIZERS,
    TABLES,
    TINY,
    USERS,
)
from fuzzing.draw_changes import (
    by_chunks,
    in_files,
    started_apart,
    with_a_quorum,
    with_changes,
    with_closures,
    with_codes,
    with_masters,
    with_pauses,
    with_uneven_data,
)
from mpisgd.tools.verification.programs.contract import violation
from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Broadcast,
    Clip,
    Convert,
    Event,
    FailedBackward,
    Reload,
    SetFrozen,
    SetGradient,
    SetRate,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program

MAX_RANKS = 4
OTHER_STRATEGIES = ("chunks", "quorum")  # changes that take another one
FORGOTTEN = (0.85, 0.05, 0.05, 0.05)  # how many optimizers were deleted before


def draw(
    seed: int, ranks: int | None = None, ranks_per_host: int | None = None, strategy: str = ""
) -> Program:
    """Return the program of a seed.

    Args:
        seed: from 0 on.
        ranks: how many; None: that is drawn, too.
        ranks_per_host: the same.
        strategy: of every program; "": drawn.
    """
    random_ = random.Random(seed)
    size = random_.choice((1, 2, 2, 2, 3, 3, 3, 3, 4))
    hosts = random_.choice((0, 0, 0, 1, 2)) if size > 1 else 0
    size = size if ranks is None else ranks
    hosts = hosts if ranks_per_host is None else ranks_per_host
    while True:
        program = _Draw(seed, random_, size, hosts, strategy).program()
        if not violation(program):
            break
    program = with_codes(program, random.Random(f"codes {seed}"))
    further = {
        "chunks": by_chunks,
        "uneven": with_uneven_data,
        "changes": with_changes,
        "pauses": with_pauses,
        "masters": with_masters,
        "files": in_files,
        "closures": with_closures,
        "quorum": with_a_quorum,
        "apart": started_apart,
    }
    for name, change in further.items():
        if strategy and name in OTHER_STRATEGIES:
            continue
        changed = change(program, random.Random(f"{name} {seed}"))
        program = program if violation(changed) else changed
    return replace(program, forgotten=random.Random(f"forgotten {seed}").choices((0, 1, 2, 3), FORGOTTEN)[0])


class _Draw:
    """The choices of a program, which depend on each other in this order: theme, options, model, events."""

    def __init__(
        self, seed: int, chance: random.Random, ranks: int, ranks_per_host: int, strategy: str = ""
    ) -> None:
        self._seed, self._chance = seed, chance
        self._ranks, self._ranks_per_host = ranks, ranks_per_host
        themes = ("plain", "divided", "shared", "local", "compressed", "several", "one bit")
        self._theme = "local" if strategy else chance.choices(themes, (6, 3, 3, 2, 2, 2, 1))[0]
        self._local = (strategy,) if strategy else LOCAL
        inexact = ("local", "one bit")  # means of parameters are rounded
        self._exact = self._maybe(0.6) and self._theme not in inexact
        self._is_sparse = self._theme in ("plain", "several", "shared", "divided") and self._maybe(0.15)
        self._halves = self._exact and not self._is_sparse and self._maybe(0.25)
        self._has_empty = self._maybe(0.1)
        self._is_tiny = self._maybe(0.1)
        alone = self._theme not in ("several", "one bit")
        self._scales = alone and self._maybe(0.12)
        self._has_closures = alone and not self._scales and self._maybe(0.1)
        whole = self._theme in ("plain", "divided", "shared") and not self._exact and not self._is_sparse
        self._is_lbfgs = whole and self._has_closures and self._maybe(0.6)
        self._resizes = ranks > 1 and self._maybe(0.15)
        self._num_ranks = ranks  # that train by now
        self._num_changes = 0  # of that
        self._data = 0

    def _maybe(self, probability: float) -> bool:
        return self._chance.random() < probability

    def program(self) -> Program:
        """Return what was drawn."""
        layers = self._layers()
        optimizers = self._optimizers(layers)
        events = self._events(layers, optimizers)
        group = self._chance.choices(("world", "duplicate", "reversed"), (18, 1, 1))[0]
        group = "world" if self._num_changes else group
        division = self._ranks, self._ranks_per_host
        return Program(self._seed, *division, self._exact, layers, optimizers, events, group, self._scales)

    # -- the model ----------------------------------------------------------------------------------

    def _layers(self) -> tuple[Layer, ...]:
        first = Layer(shape=self._shape(), dtype=self._dtype())
        others = (0, 0, 1, 2) if self._is_tiny else (0, 1, 2, 2, 3, 4, 6)
        return (first, *(self._layer() for _ in range(self._chance.choice(others))))

    def _layer(self) -> Layer:
        users = self._chance.choice(USERS) if self._maybe(0.4) else "all"
        frozen, scaled = self._maybe(0.08), self._maybe(0.15) and not self._is_lbfgs
        if self._is_sparse and self._maybe(0.5):
            kind = self._chance.choice(("sparse", "sparse", "partly sparse"))
            return Layer(kind, self._chance.choice(TABLES), "float64", users, frozen=frozen, scaled=scaled)
        kind = "embedding" if self._maybe(0.1) else "dense"
        shape = self._chance.choice(TABLES) if kind == "embedding" else self._shape()
        times = 2 if self._maybe(0.15) else 1
        transposed = len(shape) == 2 and self._maybe(0.2)
        return Layer(kind, shape, self._dtype(), users, times, transposed, frozen, scaled)

    def _shape(self) -> tuple[int, ...]:
        if self._has_empty and self._maybe(0.4):
            return EMPTY
        if self._is_tiny:
            return self._chance.choice(TINY)
        return self._chance.choice(LARGE if self._maybe(0.03) else SHAPES)

    def _dtype(self) -> str:
        if self._halves and self._maybe(0.4):
            return self._chance.choice((*HALVES[: 1 if self._scales else 2], "float32"))
        return "float32" if self._exact and self._maybe(0.15) else "float64"

    # -- the optimizers -----------------------------------------------------------------------------

    def _optimizers(self, layers: Sequence[Layer]) -> tuple[Optimizer, ...]:
        everything = tuple(range(len(layers)))
        late = everything[-1:] if len(layers) > 2 and self._maybe(0.2) else ()
        covered = everything[: len(everything) - len(late)]
        options = self._options()
        first = self._optimizer(covered, options)
        if self._theme != "several":
            return (first,)
        if self._maybe(0.5):
            return (first, self._optimizer(covered, options))
        half = len(covered) // 2
        if not half:
            return (first,)
        return (self._optimizer(covered[half:], options), self._optimizer(covered[:half], self._options()))

    def _optimizer(self, layers: tuple[int, ...], options: dict[str, str]) -> Optimizer:
        offered = SPARSE_OPTIMIZERS if self._is_sparse else SMOOTH_OPTIMIZERS
        if self._exact:
            offered = SPARSE_OPTIMIZERS[:1] if self._is_sparse else EXACT_OPTIMIZERS
        if self._theme == "one bit":
            offered = ONE_BIT_OPTIMIZERS
        if self._is_lbfgs:
            offered = CLOSURE_OPTIMIZERS
        name, settings = self._chance.choice(offered)
        names = self._chance.choice(("model", "model", "other", "none"))
        return Optimizer(name, tuple(settings.items()), layers, tuple(options.items()), names)

    def _options(self) -> dict[str, str]:
        options: dict[str, str] = {}
        if self._theme == "one bit":
            return options
        if self._theme == "divided":
            options["strategy"] = self._chance.choice(SHARDED)
        if self._theme == "local":
            options["strategy"] = self._chance.choice(self._local)
        if self._theme == "shared" or (self._theme == "divided" and self._maybe(0.2)):
            options["share_parameters"] = "True"
        if self._theme == "compressed":
            options["compression"] = self._chance.choice(COMPRESSORS)
            if self._maybe(0.1):
                options = {"op": "mpisgd.Adasum"}
        elif self._exact and not self._is_sparse and self._theme != "local" and self._maybe(0.1):
            options["compression"] = self._chance.choice(CASTS)
        if self._theme != "local":
            self._choose_reduction(options)
        if self._maybe(0.25):
            options["backward_passes_per_step"] = self._chance.choice("23")
        if self._maybe(0.4):
            options["bucket_cap_bytes"] = self._chance.choice(("1", "64", "1000"))
        if self._maybe(0.3):
            options["overlap"] = (
                "False" if self._theme == "several" else self._chance.choice(("True", "False"))
            )
        return options

    def _choose_reduction(self, options: dict[str, str]) -> None:
        if self._theme not in ("compressed", "several") and self._maybe(0.15):
            options["op"] = "mpisgd.ReduceOp.SUM"
        elif "op" not in options and self._maybe(0.1):
            options["gradient_predivide_factor"] = self._chance.choice(("2.0", "0.5"))
        if not self._scales and self._maybe(0.1):
            options["error_if_nonfinite"] = "True"
        if self._maybe(0.1):
            options["check_in_sync_every"] = "2"

    # -- what happens -------------------------------------------------------------------------------

    def _events(self, layers: Sequence[Layer], optimizers: Sequence[Optimizer]) -> tuple[Event, ...]:
        events: list[Event] = []
        late = sorted(set(range(len(layers))) - {i for o in optimizers for i in o.layers})
        for _ in range(self._chance.choice((2, 3, 4, 5, 6))):
            events += self._between(layers, late)
            events += self._step(layers, optimizers)
        return tuple(events)

    def _between(self, layers: Sequence[Layer], late: list[int]) -> list[Event]:
        """Return what happens between two steps."""
        events: list[Event] = []
        if late and self._maybe(0.4):
            events.append(AddGroup(late.pop()))
        if len(layers) > 1 and self._maybe(0.15):
            events.append(SetFrozen(self._chance.randrange(1, len(layers)), self._maybe(0.6)))
        if self._maybe(0.12):
            events.append(Reload(self._maybe(0.7)))
        if self._resizes and self._maybe(0.4):
            others = [ranks for ranks in range(1, self._ranks + 1) if ranks != self._num_ranks]
            self._num_ranks = self._chance.choice(others)
            self._num_changes += 1
            events.append(Reload(ranks=self._num_ranks))
        if self._maybe(0.05):
            events.append(Broadcast(self._chance.randrange(self._num_ranks)))
        if self._theme in ("plain", "several", "compressed") and self._maybe(0.15):
            events += self._convert(layers)
        if self._maybe(0.08):
            events.append(SetRate(0.5))
        if self._maybe(0.06):
            events += [ZeroGrad(), FailedBackward((self._next(),))]
        return events

    def _convert(self, layers: Sequence[Layer]) -> list[Event]:
        images = [i for i, layer in enumerate(layers) if len(layer.shape) == 4]
        if images and self._maybe(0.7):
            return [Convert(self._chance.choice(images), channels_last=True)]
        return [Convert(self._chance.randrange(len(layers)), "float32")] if self._exact else []

    def _next(self) -> int:
        self._data += 1
        return self._data

    def _step(self, layers: Sequence[Layer], optimizers: Sequence[Optimizer]) -> list[Event]:
        """Return a step with what belongs to it; gradients are reset first where they must be."""
        keeps = self._exact or optimizers[0].sums or self._theme in ("divided", "shared", "compressed")
        events: list[Event] = []
        if self._is_lbfgs or (self._has_closures and self._maybe(0.5)):
            return [ZeroGrad(), *self._set(layers, 0.1), Step(closure=(self._next(),))]
        if keeps or self._scales or self._maybe(0.8):
            by_model = self._maybe(0.15)
            events.append(ZeroGrad(self._maybe(0.7) or (by_model and keeps), by_model))
        passes = min(optimizer.passes for optimizer in optimizers)
        count = self._chance.choice((passes, passes, passes, 1, max(1, passes - 1)))
        if not keeps and self._maybe(0.15):
            count += 1
        muted = self._theme != "one bit" and self._maybe(0.15)
        skipped = self._skipped() if count <= passes else ()
        for number in range(count):
            if muted and self._maybe(0.6):
                events.append(Backward((self._next(),), no_sync=True))
            overflow = self._overflow() if self._scales else ()
            events.append(Backward((self._next(),), skipped if number == count - 1 else (), False, overflow))
        is_reduced = count % passes == 0
        if muted and not (keeps and is_reduced) and self._maybe(0.3):
            events.append(Backward((self._next(),), no_sync=True))
            is_reduced = False
        if self._scales and (skipped or not is_reduced):
            events.append(Synchronize())
        if self._theme != "one bit":
            events += self._clip(is_whole=not skipped)
            if not skipped and not self._scales and (set_ := self._set(layers, 0.08)):
                events += [*([] if is_reduced else [Synchronize()]), *set_, *self._clip(is_whole=True)]
        return [*events, *[Step()] * (2 if not keeps and not self._scales and self._maybe(0.05) else 1)]

    def _set(self, layers: Sequence[Layer], chance: float) -> list[Event]:
        """Return gradients that the program sets, alike on all ranks."""
        there = [i for i, layer in enumerate(layers) if layer.kind == "dense" and layer.used_by == "all"]
        if not there or not self._maybe(chance):
            return []
        return [
            SetGradient(self._chance.choice(there), self._maybe(0.7)) for _ in range(1 + self._maybe(0.4))
        ]

    def _overflow(self) -> tuple[int, ...]:
        return (self._chance.randrange(self._num_ranks),) if self._maybe(0.25) else ()

    def _skipped(self) -> tuple[int, ...]:
        if self._num_ranks == 1 or not self._maybe(0.15):
            return ()
        ranks = list(range(self._num_ranks))
        return tuple(sorted(self._chance.sample(ranks, self._chance.randrange(1, self._num_ranks))))

    def _clip(self, *, is_whole: bool) -> list[Event]:
        events: list[Event] = []
        if self._maybe(0.15):
            events.append(Synchronize())
        if self._is_sparse or self._has_empty or not self._maybe(0.25):
            return events
        is_plain = is_whole and self._theme in ("plain", "compressed", "several")
        if is_plain and self._maybe(0.3):
            return [*events, Clip(self._chance.choice((0.5, 0.125)), by_value=True)]
        norm = float("inf") if self._exact else self._chance.choice((2.0, 2.0, 1.0, float("inf")))
        by_torch = is_plain and self._maybe(0.4)
        return [*events, Clip(self._chance.choice((0.5, 0.125)), norm, by_torch)]
