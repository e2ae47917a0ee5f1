"""`event_text`: one event of a program, as lines of Python."""

from __future__ import annotations

from collections.abc import Iterator

from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.events import Event
from mpisgd.tools.verification.programs.program import ONE_BIT, Program, examples_of

__all__ = ["event_text", "examples_text"]


def event_text(program: Program, event: Event) -> Iterator[str]:
    """Yield the lines of an event."""
    waits = any("overlap_forward" in optimizer.option("strategy") for optimizer in program.optimizers)
    match event:
        case events.Backward():
            skipped = f", skipped={event.skipped}" if event.skipped else ""
            skipped += f", overflow={event.overflow}" if event.overflow else ""
            call = f"backward({', '.join(map(str, event.data))}{skipped})"
            if event.no_sync:
                yield "with contextlib.ExitStack() as stack:"
                yield "    [stack.enter_context(opt.no_sync()) for opt in opts if wraps]"
                yield f"    {call}"
            else:
                yield call
        case events.FailedBackward():
            yield "with contextlib.suppress(ArithmeticError):"
            yield f"    raises = Raises.apply(p{program.optimizers[0].layers[0]}.double().sum())"
            parts = ", ".join(f"loss(ranks[0], {data})" for data in event.data)
            yield f"    sum([raises, {parts}]).backward() if wraps else None"
            yield "[opt.zero_grad() for opt in opts]"
        case events.Step():
            for place, optimizer in enumerate(program.optimizers):
                if optimizer.weighs_learners:
                    told = f"opts[{place}].synchronizer.next_batch(examples=1 + mpisgd.rank())"
                    yield f"{told} if wraps else None"
            if event.as_they_are:
                yield "with contextlib.ExitStack() as stack:"
                yield "    [stack.enter_context(opt.skip_synchronize()) for opt in opts if wraps]"
                lines = event_text(program, events.Step(event.closure))
                yield from (f"    {line}" for line in lines if "next_batch" not in line)
            elif event.closure:
                data = ", ".join(map(str, event.closure))
                yield "def closure():"
                yield "    [opt.zero_grad() for opt in opts]"
                yield f"    return backward({data})"
                yield "[opt.step(torch.enable_grad()(closure)) for opt in opts]"
            elif program.scaler:
                yield "[scaler.step(opt) for opt in opts]"
                yield "scaler.update()"
            else:
                yield "[opt.step() for opt in opts]"
            if waits and not event.as_they_are:
                yield "[opt.synchronizer.wait() for opt in opts if wraps]"
        case events.ZeroGrad():
            if event.by_model:
                params = ", ".join(f"p{i}" for i in range(len(program.layers)))
                yield f"nn.ParameterList([{params}]).zero_grad(set_to_none={event.set_to_none})"
            else:
                yield f"[opt.zero_grad(set_to_none={event.set_to_none}) for opt in opts]"
        case events.Clip():
            if program.scaler:
                yield "[scaler.unscale_(opt) for opt in opts]"
            yield "for opt in opts:"
            arguments = f"{event.max_norm}, {event.norm_type!r}".replace("inf", "math.inf")
            params = "[p for group in opt.param_groups for p in group['params']]"
            torchs = f"nn.utils.clip_grad_norm_({params}, {arguments})"
            if event.by_value:
                torchs = torchs.replace("clip_grad_norm_", "clip_grad_value_").split("], ")[0]
                torchs += f"], {event.max_norm})"
            yield (
                f"    {torchs}"
                if event.by_torch or event.by_value
                else (f"    opt.clip_grad_norm_({arguments}) if wraps else {torchs}")
            )
        case events.SetGradient():
            shape, dtype = tuple(program.layers[event.layer].shape), f"p{event.layer}.dtype"
            value = f"numbers({shape}, {event.layer}).to({dtype})" if event.exists else "None"
            yield f"p{event.layer}.grad = {value}"
        case events.Synchronize():
            yield "[opt.synchronize() for opt in opts if wraps]"
        case events.SetFrozen():
            yield f"p{event.layer}.requires_grad_({not event.frozen})"
        case events.AddGroup():
            rate = dict(program.optimizers[event.optimizer].settings)["lr"]
            yield f"has_{event.layer} = True"
            yield f"groups_{event.optimizer}.append({{'params': [p{event.layer}], 'lr': {rate}}})"
            added = f"{{'params': [p{event.layer}], 'lr': {rate}}}"
            yield f"opts[{event.optimizer}].add_param_group({added})"
        case events.Reload(ranks=ranks) if ranks:
            yield from _resize(program, event)
        case events.Reload():
            yield "states = copy.deepcopy([opt.state_dict() for opt in opts])"
            made = ", ".join(f"make_{i}()" for i in range(len(program.optimizers)))
            if event.clears:
                yield "opts.clear()"
            yield f"opts = [{made}]"
            yield "[opt.load_state_dict(state) for opt, state in zip(opts, states)]"
            yield "[opt.zero_grad() for opt in opts]"
        case events.Join():
            rates = any(isinstance(event, events.SetRate) for event in program.events)
            follow = "[scaler]" if program.scaler else "[]" if rates else "None"
            yield f"uneven = blocks.enter_context(mpisgd.join(*opts, follow={follow})) if wraps else None"
            size = "mpisgd.size()" if not program.is_resized else "(group.size if wraps else len(ranks))"
            yield f"size, examples = {size}, {examples_text(program, event)}"
        case events.RunOut():
            yield f"out, examples = out | {set(event.ranks)}, {examples_text(program, event)}"
            yield f"blocks.close() if wraps and rank_ in {list(event.ranks)} else None"
        case events.EndJoin():
            yield "examples = {}"
            yield "blocks.close()"
            yield "out = set()"
        case events.Commit():
            yield "state.commit()"
        case events.Lose():
            yield f"gone = [rank for rank in {list(event.ranks)} if rank in left]"
            yield "if gone[:1] == [me]:"
            yield f"    lose_ranks(*map(left.index, gone), waits={event.waits})"
        case events.SetRate():
            yield "for opt in opts:"
            yield "    for group in opt.param_groups:"
            yield f"        group['lr'] *= {event.factor}"
        case events.Broadcast():
            yield "if wraps:"
            source = f"{event.src}{_of_group(program)}"
            yield f"    mpisgd.broadcast_parameters({_named(program)}, {source})"
            yield f"    [mpisgd.broadcast_optimizer_state(opt, {source}) for opt in opts]"
        case events.Convert():
            to = "memory_format=torch.channels_last" if event.channels_last else f"torch.{event.dtype}"
            yield f"nn.ParameterList([p{event.layer}]).to({to})"


def examples_text(program: Program, until: Event) -> str:
    """Return how many examples each rank with data has after an event, as Python."""
    ranks, out = program.ranks, set[int]()
    for event in program.events:
        if isinstance(event, events.Reload) and event.ranks:
            ranks = event.ranks
        out |= {*event.ranks} if isinstance(event, events.RunOut) else set()
        if event is until:
            break
    return repr(examples_of(program, {*range(ranks)} - out))


def _named(program: Program) -> str:
    pairs = ", ".join(f"('{i}', p{i}.detach())" for i in range(len(program.layers)))
    return f"[{pairs}]"


def _of_group(program: Program) -> str:
    return ", group" if program.group != "world" or program.is_resized else ""


def _resize(program: Program, event: events.Reload) -> Iterator[str]:
    """Yield how other ranks go on with the consensus of the former ones."""
    made = ", ".join(f"make_{i}()" for i in range(len(program.optimizers)))
    yield "states = copy.deepcopy([opt.state_dict() for opt in opts])"
    yield "if wraps:"
    if not any(optimizer.name in ONE_BIT for optimizer in program.optimizers):
        yield "    for opt in opts:"
        yield "        params = [p for group_ in opt.param_groups for p in group_['params']]"
        yield "        with opt.consensus():"
        yield "            values = [p.detach().clone() for p in params]"
        yield "        [p.data.copy_(value) for p, value in zip(params, values)]"
    if event.forgets:
        yield "    [state['mpisgd'].update(own=None) for state in states if 'mpisgd' in state]"
    yield "    opts.clear()"
    yield f"    mpisgd.broadcast_parameters({_named(program)}, 0)"
    yield "    everyones = [None] * mpisgd.size()"
    scale = "scaler.state_dict()" if program.scaler else "None"
    yield f"    mpisgd.all_gather_object(everyones, (states, {scale}))"
    yield "    states, scale = everyones[mpisgd.rank() if takes_part else 0]"
    if program.scaler:
        yield "    scaler.load_state_dict(scale)"
    yield f"    group, takes_part = mpisgd.new_group(range({event.ranks})), mpisgd.rank() < {event.ranks}"
    weight = 1 if program.optimizers[0].sums else event.ranks * program.optimizers[0].averaged_passes
    yield f"    weight = {weight}"
    yield f"ranks = ranks if wraps else range({event.ranks})"
    yield f"opts = [{made}] if takes_part else []"
    yield "[opt.load_state_dict(state) for opt, state in zip(opts, states)]"
    yield "[opt.zero_grad() for opt in opts]"
