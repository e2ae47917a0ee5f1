"""Methods x situations: the methods, and what became of one in some situations.

Which ranks and hosts a program has goes round `DIVISIONS`, so that each situation meets each. `covering` says
which situations come together in a program.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

import mpisgd
from mpisgd.arguments import call_text
from mpisgd.compress.compressor import has_momentum
from mpisgd.errors import InvalidArgument
from mpisgd.methods import catalogue
from mpisgd.methods.cast.cast import Cast
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.contract import violation
from mpisgd.tools.verification.programs.execute import has_reference
from mpisgd.tools.verification.programs.option_text import evaluated
from mpisgd.tools.verification.programs.program import Optimizer, Program
from mpisgd.tools.verification.programs.serial_definition import has_codes
from mpisgd.tools.verification.situations import Situation, compose, plain_program

__all__ = [
    "ALL_DIVISIONS",
    "DIVISIONS",
    "ONE_BIT",
    "Division",
    "Row",
    "Run",
    "Tried",
    "program_of",
    "row_of",
    "rows",
    "try_in",
]

Division = tuple[int, int]  # ranks, and those of each host; 0: all are on one

DIVISIONS: tuple[Division, ...] = ((3, 0), (2, 0), (4, 2), (3, 1), (4, 0), (2, 1), (3, 2), (1, 0))
ALL_DIVISIONS: tuple[Division, ...] = (*DIVISIONS, (8, 0), (8, 4), (8, 3), (5, 2))
MOMENTUM = (("lr", 0.25), ("momentum", 0.5))
OF_MASTERS = (("lr", 0.16015625), ("momentum", 0.5))  # rounded to 16 bits from the first steps on
ONE_BIT = tuple(
    Optimizer(kind.__name__, (("lr", 0.01), *settings.items()))
    for kind in catalogue.optimizers()
    for settings in kind.examples()
)

Run = Callable[[Program], Verdict]


class Row(NamedTuple):
    """One method.

    Attributes:
        name: in tables.
        optimizer: what `DistributedOptimizer` is asked for.
        exact: whether all its numbers are exact, so that bits are compared.
        is_own: whether it is the user's: nobody has looked at what it is refused in.
        dtype: of the parameters that every program trains.
        is_quick: whether it may be a part of the quick form.
    """

    name: str
    optimizer: Optimizer
    exact: bool
    is_own: bool = False
    dtype: str = "float64"
    is_quick: bool = True

    def program(self, situations: Sequence[Situation], division: Division) -> Program | None:
        """Return the program in which all of these happen, None where they make no sense together."""
        names = [self.name, *(situation.name for situation in situations), str(division)]
        seed = zlib.crc32(" ".join(names).encode())
        plain = plain_program(self.optimizer, *division, exact=self.exact, seed=seed, dtype=self.dtype)
        return compose(plain, situations)


class Tried(NamedTuple):
    """What became of a method in some situations.

    Attributes:
        method: its name.
        situations: their names; none in a plain program.
        kind: "ok", "refused", "impossible": no program can do that; else what is wrong, as in `Verdict`, or
            "missed", where it was broken on purpose and nothing differed.
        text: why.
        has_reference: whether it was compared with one process or a paper, and not with itself alone.
        program: which was run, in a form that `parse` reads; "" if none.
        sabotage: how it was broken on purpose.
    """

    method: str
    situations: tuple[str, ...]
    kind: str
    text: str = ""
    has_reference: bool = False
    program: str = ""
    sabotage: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong."""
        return self.kind not in ("ok", "refused", "impossible")


def rows() -> Iterator[Row]:
    """Yield the methods: every example of a strategy and of a compressor, pairs of both, and optimizers."""
    kinds: set[tuple[type, type]] = set()
    for strategy, compressor in catalogue.examples_that_go_together():
        if not strategy.goes_with.repeats.goes:
            continue  # what it does depends on time: its events are replayed
        plain = strategy == mpisgd.Synchronous() or compressor == mpisgd.Compression.none
        pair = type(strategy), type(compressor)
        if pair in kinds and not plain:
            continue
        kinds.add(pair)
        options = []
        if strategy != mpisgd.Synchronous():
            options.append(("strategy", text_of(strategy)))
        if compressor != mpisgd.Compression.none:
            options.append(("compression", text_of(compressor)))
        name = ", ".join(text for _, text in options) or "mpisgd.Synchronous()"
        is_exact = strategy.goes_with.op.goes and isinstance(compressor, Cast)
        exact = is_exact and not has_codes(strategy)
        settings = MOMENTUM[:1] if has_momentum(compressor) else MOMENTUM  # one of both has it
        over_hosts = getattr(strategy, "hierarchy", None) is not None
        if over_hosts:  # is refused in more situations
            name = name.replace("LocalSGD", "LocalSGD over hosts", 1)
        optimizer = Optimizer("SGD", settings, (), tuple(options))
        row = Row(name.replace("mpisgd.", ""), optimizer, exact, is_quick=not over_hosts)
        yield row if _is_defined(row) else _per_parameter(row)
    yield from _in_files()
    yield from _with_masters()
    yield from _with_a_quorum()
    for optimizer in ONE_BIT:
        given = ", ".join(f"{key}={value}" for key, value in optimizer.settings[1:])
        yield Row(f"{optimizer.name}({given})", optimizer, exact=False)


def row_of(text: str) -> Row:
    """Return the row of a method of the user's own, written as `my_methods:BlockMomentum(steps=2)`.

    Raises:
        InvalidArgument: it is neither a strategy nor a compressor.
    """
    expression = text.replace(":", ".", 1)
    value = evaluated(expression)
    if not isinstance(value, mpisgd.Strategy | mpisgd.Compressor):
        raise InvalidArgument(f"--method: {text} is neither a strategy nor a compressor")
    option = "strategy" if isinstance(value, mpisgd.Strategy) else "compression"
    return Row(text, Optimizer("SGD", MOMENTUM, (), ((option, expression),)), exact=False, is_own=True)


def _is_defined(row: Row) -> bool:
    program = row.program((), DIVISIONS[0])
    return program is not None and has_reference(program)


def _in_files() -> Iterator[Row]:
    """Yield those that keep optimizer state in files, of blocks that are shorter than the long parameters."""
    offload = mpisgd.Offload(tempfile.gettempdir(), block_bytes=4096, io="buffered")
    for strategy in mpisgd.Sharded.examples():
        if strategy.gradients is None and strategy.parameters is None:
            name = call_text(strategy).replace("Sharded", "Sharded in files", 1)
            text = text_of(replace(strategy, offload=offload))
            yield Row(name, Optimizer("SGD", MOMENTUM, (), (("strategy", text),)), exact=True)


def _with_a_quorum() -> Iterator[Row]:
    """Yield those whose learners meet at the first rank, of equal weights or by examples."""
    for weights, learners in (("equal", "rank"), ("tokens", "rank"), ("tokens", "host")):
        strategy = mpisgd.DiLoCo(2, quorum="all", weights=weights, learners=learners)
        options = (("strategy", text_of(strategy)),)
        more = f", learners={learners!r}" if learners != "rank" else ""
        name = f"DiLoCo with a quorum(weights={weights!r}{more})"
        yield Row(name, Optimizer("SGD", MOMENTUM, (), options), exact=False, is_quick=False)


def _with_masters() -> Iterator[Row]:
    """Yield those that update masters: exact ones of 16 bits, and one that clips what is not exact."""
    plain, *others = (s for s in mpisgd.Sharded.examples() if s.gradients is None and s.parameters is None)
    halves = [("bfloat16", replace(each, master_dtype=torch.float32)) for each in (plain, *others)]
    for dtype, strategy in (*halves, ("float32", replace(plain, master_dtype=torch.float64))):
        name = call_text(strategy).replace("Sharded", "Sharded with masters", 1)
        optimizer = Optimizer("SGD", OF_MASTERS, (), (("strategy", text_of(strategy)),))
        yield Row(name, optimizer, exact=dtype == "bfloat16", dtype=dtype)


def _per_parameter(row: Row) -> Row:
    """Return the method with a bucket for each parameter: then papers of what it draws know its buckets."""
    options = (*row.optimizer.options, ("bucket_cap_bytes", "1"))
    return row._replace(optimizer=replace(row.optimizer, options=options))


def program_of(
    row: Row, situations: Sequence[Situation], number: int, divisions: Sequence[Division] = DIVISIONS
) -> tuple[Program | None, str]:
    """Return a program on the first division, from `number` on, that has one, or why there is none."""
    why = "makes no sense"
    for place in range(len(divisions)):
        program = row.program(situations, divisions[(number + place) % len(divisions)])
        if program is not None:
            why = violation(program)
            if not why:
                return program, ""
    return None, why


def try_in(
    row: Row,
    situations: Sequence[Situation],
    number: int,
    run: Run,
    divisions: Sequence[Division] = DIVISIONS,
) -> Tried:
    """Return the outcome of a method in some situations together; see `program_of`."""
    names = tuple(situation.name for situation in situations)
    program, why = program_of(row, situations, number, divisions)
    if program is None:
        return Tried(row.name, names, "impossible", why)
    verdict = run(program)
    return Tried(row.name, names, verdict.kind, verdict.text, has_reference(program), repr(program))
