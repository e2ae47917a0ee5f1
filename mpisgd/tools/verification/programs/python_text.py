"""`python_text`: a program as a Python program of a few lines, which needs mpisgd's public API alone.

It trains on all ranks and, where the program has a reference in one process, once more with plain torch,
and prints both. What does not occur in the program is not in the text.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.event_text import event_text
from mpisgd.tools.verification.programs.execute import has_reference, master_dtype_of
from mpisgd.tools.verification.programs.extragradient import Extragradient
from mpisgd.tools.verification.programs.program import ONE_BIT, Layer, Optimizer, Program
from mpisgd.tools.verification.programs.training import SERIAL
from mpisgd.tools.verification.programs.variants import ranks_agree

__all__ = ["python_text"]

IMPORTS = ("import contextlib", "import copy", "import math", "", "import torch", "from torch import nn", "")
INTEGERS = "((i * (i + key) + 5 * key) % 7 - 3).double()"
COSINES = "torch.cos(i.double() * (i + key) * 0.7 + key)"
USERS = {
    "first": "rank == 0",
    "last": "rank == {last}",
    "turns": "data % {size} == rank",
    "others": "data % {size} != rank",
    "odd": "data % 2",
}
RAISES = """
class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError
"""


def python_text(program: Program) -> str:
    """Return the text; what starts it is in its first line."""
    if program.loses:
        return _text_with_losses(program)
    has_masters = any(map(master_dtype_of, program.optimizers))  # which torch alone has not
    compares = has_reference(program) and ranks_agree(program) and not has_masters
    environment = f"MPISGD_RANKS_PER_HOST={program.ranks_per_host} " if program.ranks_per_host else ""
    lines = [
        f"# {environment}mpirun -n {program.ranks} --oversubscribe python THIS_FILE",
        *IMPORTS,
        *("import mpisgd", *_imports(program), "", "mpisgd.init(timeout_s=10)"),
        *_group(program),
    ]
    lines += _definitions(program)
    lines += ["def train(ranks, weight, wraps):", *_indented(list(_body(program)), 1), "", ""]
    first = program.optimizers[0]
    weight = 1 if first.sums else program.ranks * first.averaged_passes
    lines += [f"mine = train([mpisgd.rank()], {weight}, True)"]
    lines += [f"right = train(range({program.ranks}), 1, False)"] if compares else []
    lines += [f"print(mpisgd.rank(), mine{', right' if compares else ''})"]
    return "\n".join(lines)


def _definitions(program: Program) -> list[str]:
    fails = any(isinstance(event, events.FailedBackward) for event in program.events)
    lines = ["", *RAISES.splitlines()] if fails else []
    lines += ["", "", "def numbers(shape, key):", "    i = torch.arange(math.prod(shape))"]
    return [*lines, f"    return {INTEGERS if program.exact else COSINES}.reshape(shape)", "", ""]


def _indented(lines: Iterator[str] | list[str], levels: int) -> list[str]:
    return ["    " * levels + line if line else "" for line in lines]


def _group(program: Program) -> list[str]:
    if program.group == "world":
        return ["group = None"] if program.is_resized else []
    ranks = range(program.ranks)
    return [f"group = mpisgd.new_group({list(ranks[::-1] if program.group == 'reversed' else ranks)})"]


def _body(program: Program) -> Iterator[str]:
    """Yield the lines of `train`."""
    yield from _setup(program)
    is_short = False
    for event in program.events:
        lines = list(event_text(program, event))
        is_short = (is_short or isinstance(event, events.RunOut)) and not isinstance(event, events.EndJoin)
        if is_short and not isinstance(event, events.RunOut):
            lines = ["if not (wraps and rank_ in out):", *_indented(lines, 1)]
        if program.is_resized and not (isinstance(event, events.Reload) and event.ranks):
            if isinstance(event, events.AddGroup):
                yield from lines[:2]
            lines = ["if takes_part:", *_indented(lines[2 * isinstance(event, events.AddGroup) :], 1)]
        yield from lines
    yield _result(program)


def _result(program: Program) -> str:
    return f"return [{', '.join(f'p{place}.tolist()' for place in range(len(program.layers)))}]"


def _setup(program: Program) -> Iterator[str]:
    """Yield what is before all events."""
    for place, layer in enumerate(program.layers):
        values = f"numbers({layer.shape}, {1000 + place}){_cast(layer)}"
        values += ".t().contiguous().t()" if layer.transposed else ""
        yield f"p{place} = nn.Parameter({values}{', requires_grad=False' if layer.frozen else ''})"
    if program.is_resized:
        yield "group, takes_part = None, True"
    if program.is_uneven:
        yield "rank_, out, blocks, examples = mpisgd.rank(), set(), contextlib.ExitStack(), {}"
    if program.scaler:
        yield "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=10_000)"
        yield "scaler.scale(torch.zeros(()))"
    if program.apart:
        yield f"params = [{', '.join(f'p{place}' for place in range(len(program.layers)))}]"
        yield "with torch.no_grad():"
        yield f"    [p.add_((mpisgd.rank() - {program.first_rank}) * wraps) for p in params]"
    if program.apart == "before":
        yield from _become_alike(program)
    yield from _make_optimizers(program)
    if program.apart == "after":
        yield from _become_alike(program)
    late = {event.layer for event in program.events if isinstance(event, events.AddGroup)}
    yield from (f"has_{place} = False" for place in sorted(late))
    yield from _loss(program, late)
    yield from _backward(program)


def _become_alike(program: Program) -> Iterator[str]:
    """Yield the lines in which the first rank gives the others its parameters."""
    source = f"{program.first_rank}{'' if program.group == 'world' else ', group'}"
    yield "if wraps:"
    yield f"    mpisgd.broadcast_parameters([(f'{{i}}', p) for i, p in enumerate(params)], {source})"


def _text_with_losses(program: Program) -> str:
    """Return the text of a program whose ranks are threads, since nothing else loses one at a given wait."""
    each = program.ranks_per_host or program.ranks
    hosts = [min(each, program.ranks - first) for first in range(0, program.ranks, each)]
    lines = [
        "# python THIS_FILE",
        *IMPORTS,
        "import mpisgd",
        *_imports(program),
        "from mpisgd import elastic",
    ]
    lines += ["from mpisgd.job.threads_as_ranks import lose_ranks, run_ranks"]
    lines += [*_definitions(program), "def train():", *_indented(list(_elastic_body(program)), 1), "", ""]
    given = f"seed={program.seed}, ranks_per_host={hosts}, losses=()"
    return "\n".join([*lines, f"print(*run_ranks({program.ranks}, train, {given}), sep='\\n')"])


def _elastic_body(program: Program) -> Iterator[str]:
    """Yield the lines of `train` where ranks may be lost."""
    optimizers, params = range(len(program.optimizers)), [f"p{i}" for i in range(len(program.layers))]
    late = sorted({event.layer for event in program.events if isinstance(event, events.AddGroup)})
    yield "me, ranks, wraps = mpisgd.rank(), [mpisgd.rank()], True"
    yield f"weight = {1 if program.optimizers[0].sums else program.ranks}"
    yield from _group(program)
    yield from _setup(program)
    yield f"params = [{', '.join(params)}]"
    values = [f"opt_{place}=opts[{place}]" for place in optimizers] + ["scaler=scaler"] * program.scaler
    yield "state = elastic.State(model=nn.ParameterList(params), event=0,"
    yield f"    frozen=[not p.requires_grad for p in params], {', '.join(values)})"
    if program.group != "world":
        yield "def make_groups():"
        yield "    nonlocal group"
        step = "[::-1]" if program.group == "reversed" else ""
        yield f"    group = mpisgd.new_group(list(range(mpisgd.size())){step})"
        yield from (f"    state.opt_{place}.rebuild(group)" for place in optimizers)
        yield "state.register_reset_callbacks([make_groups])"
    yield "@elastic.run"
    yield "def go_on(state):"
    changed = ["opts", "weight", *["scaler"] * program.scaler, *(f"has_{place}" for place in late)]
    yield f"    nonlocal {', '.join(changed)}"
    yield f"    opts = [{', '.join(f'state.opt_{place}' for place in optimizers)}]"
    yield "    [p.requires_grad_(not frozen) for p, frozen in zip(params, state.frozen)]"
    if program.scaler:
        yield "    scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=10_000)"
        yield "    scaler.scale(torch.zeros(()))"
        yield "    scaler.load_state_dict(state.scaler.state_dict())"
        yield "    state.scaler = scaler"
    yield "    left = [None] * mpisgd.size()"
    yield "    mpisgd.all_gather_object(left, me)"
    yield f"    weight = {'1' if program.optimizers[0].sums else 'len(left)'}"
    yield f"    while state.event < {len(program.events)}:"
    yield "        now = state.event"
    yield "        state.event += 1"
    for place, event in enumerate(program.events):
        yield f"        if now == {place}:"
        yield from _indented(list(event_text(program, event)), 3)
    yield from (f"        state.opt_{place} = opts[{place}]" for place in optimizers)
    yield "        state.frozen = [not p.requires_grad for p in params]"
    yield "go_on(state)"
    yield _result(program)


def _backward(program: Program) -> Iterator[str]:
    overflows = any(isinstance(event, events.Backward) and event.overflow for event in program.events)
    infinite = " * (math.inf if rank in overflow else 1)" if overflows else ""
    scaled = "scaler.scale(sum(exist) * weight)" if program.scaler else "(sum(exist) * weight)"
    yield f"def backward(*batches, skipped=(){', overflow=()' if overflows else ''}):"
    yield "    there = [rank for rank in ranks if rank not in skipped]"
    if program.is_uneven:
        yield "    there = [rank for rank in there if rank in examples or not examples]"
        if program.says_examples:
            yield "    if wraps and examples:"
            yield "        uneven.next_batch(examples=examples[rank_])"
    yield "    losses = [(rank, loss(rank, data)) for rank in there for data in batches]"
    if program.is_uneven and not program.optimizers[0].sums:
        infinite += " * (1 if wraps or not examples else size * examples[rank] / sum(examples.values()))"
    yield f"    exist = [each{infinite} for rank, each in losses if each is not None and each.requires_grad]"
    yield "    if exist:"
    yield f"        {scaled}.backward()"
    yield "    return (sum(exist) * weight).detach() if exist else torch.zeros(())"
    yield ""


def _cast(layer: Layer) -> str:
    return "" if layer.dtype == "float64" else f".to(torch.{layer.dtype})"


def _loss(program: Program, late: set[int]) -> Iterator[str]:
    covered = late | {place for optimizer in program.optimizers for place in optimizer.layers}
    yield ""
    yield "def loss(rank, data):"
    yield "    total = None"
    for place, layer in enumerate(program.layers):
        if layer.used_by == "none" or place not in covered:
            continue
        conditions = [f"has_{place}"] if place in late else []
        if layer.used_by != "all":
            conditions.append(USERS[layer.used_by].format(last=program.ranks - 1, size=program.ranks))
        levels = 1
        if conditions:
            yield f"    if {' and '.join(conditions)}:"
            levels = 2
        for use in range(layer.times):
            yield from _indented(list(_part(program, place, layer, use)), levels)
    yield "    return total"
    yield ""


def _part(program: Program, place: int, layer: Layer, use: int) -> Iterator[str]:
    yield f"key = {program.seed % 1000 + 3 * place + 101 * use} + 31 * rank + 17 * data"
    if layer.kind == "dense":
        numel, product = 1, f"p{place} * numbers({layer.shape}, key){_cast(layer)}"
        for length in layer.shape:
            numel *= length
    else:
        rows, width = layer.shape
        numel = 4 * width
        sparse = {"embedding": "False", "sparse": "True"}.get(layer.kind, "data % 2 == 0")
        yield f"rows = (torch.arange(4) * (key % 3 + 1) + key) % {rows}"
        looked_up = f"nn.functional.embedding(rows, p{place}, sparse={sparse})"
        product = f"{looked_up} * numbers((4, {width}), key){_cast(layer)}"
    part = f"({product}).sum().double()"
    if layer.recomputed:
        begin = "torch.zeros((), dtype=torch.float64, requires_grad=True)"
        recomputed = f"checkpoint(lambda begin: {part} + begin, {begin}, use_reentrant=True)"
        part = f"({recomputed} if p{place}.requires_grad else {part})"
    if program.exact:
        yield f"total = {part} if total is None else total + {part}"
    else:
        yield f"part = {part} / {max(1, numel)}"
        yield "total = part if total is None else torch.tanh(total / 2 + part)"


def _forgotten(program: Program) -> Iterator[str]:
    """Yield the lines that make optimizers of other parameters, and delete them."""
    if program.forgotten:
        plain = "torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)"
        group = "" if program.group == "world" else ", group=group"
        made = f"mpisgd.DistributedOptimizer({plain}{group})"
        yield f"made = [{made} for _ in range({program.forgotten} * wraps)]"
        yield "del made"


def _make_optimizers(program: Program) -> Iterator[str]:
    yield from _forgotten(program)
    for place, optimizer in enumerate(program.optimizers):
        late = [
            event.layer
            for event in program.events
            if isinstance(event, events.AddGroup) and event.optimizer == place
        ]
        yield f"groups_{place} = {_groups(program, optimizer)}"
        yield f"def make_{place}():"
        settings = "".join(f", {name}={value!r}" for name, value in optimizer.settings)
        group = ", group=group" if program.group != "world" or program.is_resized else ""
        if optimizer.name in ONE_BIT:
            wrapped = f"mpisgd.{optimizer.name}(groups_{place}{settings}{group})"
            serial = f"torch.optim.Adam(groups_{place})"
            if optimizer.name == SERIAL:
                serial = f"SerialDion(groups_{place}{settings})"
            yield f"    return {wrapped} if wraps else {serial}"
            yield f"opts = [make_{place}()]"
            continue
        yield f"    opt = {optimizer.text}(groups_{place}{settings})"
        options = [f"{name}={text}" for name, text in optimizer.options]
        options += [group.removeprefix(", ")] if group else []
        if optimizer.names != "none":
            layers = sorted({*optimizer.layers, *late})
            pairs = ", ".join(f"({f'layers.{i}'!r}, p{i})" for i in layers)
            options.append(f"named_parameters=[{pairs}]")
        wrapped = f"mpisgd.DistributedOptimizer({', '.join(['opt', *options])})"
        yield f"    return {wrapped} if wraps else opt"
        if place + 1 < len(program.optimizers):
            yield ""
        else:
            yield f"opts = [{', '.join(f'make_{i}()' for i in range(place + 1))}]"


def _groups(program: Program, optimizer: Optimizer) -> str:
    rate = dict(optimizer.settings)["lr"]
    groups = []
    for scaled, factor in ((False, 1.0), (True, 0.5)):
        layers = [f"p{i}" for i in optimizer.layers if program.layers[i].scaled is scaled]
        if layers:
            groups.append(f"{{'params': [{', '.join(layers)}], 'lr': {rate * factor}}}")
    return f"[{', '.join(groups)}]"


def _imports(program: Program) -> Iterator[str]:
    if any(layer.recomputed for layer in program.layers):
        yield "from torch.utils.checkpoint import checkpoint"
    if any(optimizer.kind is Extragradient for optimizer in program.optimizers):
        yield "from mpisgd.tools.verification.programs.extragradient import Extragradient"
    if any(optimizer.name == SERIAL for optimizer in program.optimizers):
        yield "from mpisgd.tools.verification.programs.serial_dion import SerialDion"
