"""What became of a program in which ranks are lost, from what those have seen that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpisgd.elastic.buddy_replicas import buddy_of
from mpisgd.job.recovery import has_quorum
from mpisgd.job.threads_as_ranks import LOST
from mpisgd.tools.verification.programs.compare import Verdict, judge, observe
from mpisgd.tools.verification.programs.contract import may_be_refused
from mpisgd.tools.verification.programs.events import Lose
from mpisgd.tools.verification.programs.execute import digest, state_digest
from mpisgd.tools.verification.programs.lost_ranks import Resumption, lost_in, without_losses
from mpisgd.tools.verification.programs.program import Program
from mpisgd.tools.verification.programs.surviving import Survived, references_after
from mpisgd.tools.verification.programs.variants import ranks_agree

__all__ = ["conclude_after_losses", "differing", "hosts_of"]

TOO_FEW, STATE_LOST = "JobError", "StateLost"  # errors of those that are left


def hosts_of(program: Program) -> list[range]:
    """Return the ranks of each host."""
    ranks, each = program.ranks, program.ranks_per_host or program.ranks
    return [range(first, min(first + each, ranks)) for first in range(0, ranks, each)]


def conclude_after_losses(program: Program, outcomes: Sequence[Any], seen: Mapping[int, Survived]) -> Verdict:
    """Return the outcome of a program.

    Args:
        program: with losses.
        outcomes: of all ranks; LOST, or `PeerLost` where a rank has noticed a loss after its end.
        seen: what those have seen that have come to their end, lost ones perhaps included.
    """
    lost = {rank for rank, outcome in enumerate(outcomes) if outcome is LOST}
    if wrong := _wrongly_lost(program, lost):
        return Verdict("lost", wrong)
    left = [rank for rank in range(program.ranks) if rank not in lost]
    if unseen := [f"rank {rank}: {outcomes[rank]}" for rank in left if rank not in seen]:
        return Verdict("error PeerLost", "\n".join(unseen))
    if (refused := _refused(program, lost, [seen[rank] for rank in left])) is not None:
        return refused
    histories = {seen[rank].resumptions for rank in left}
    if len(histories) > 1:
        return Verdict("history", "\n".join(f"rank {rank}: {seen[rank].resumptions}" for rank in left))
    (history,) = histories
    has_failed = any(seen[rank].run.failure for rank in left)
    if not has_failed and (wrong := _not_recovered_from(program, history, lost)):
        return Verdict("history", wrong)
    references = references_after(program, history)
    observed = [observe(program, seen[rank].run, references[rank], ()) for rank in left]
    plain = without_losses(program, history)
    return judge(observed, ranks_agree=ranks_agree(plain), may_be_refused=may_be_refused(plain))


def differing(ones: Mapping[int, Survived], others: Mapping[int, Survived]) -> str:
    """Return where two runs in different orders have different bits that must not, "" if nowhere.

    Ranks that are lost in the middle of something may leave the others at different commits, or be lost after
    the end.
    """
    both = [(rank, ones[rank], others[rank]) for rank in sorted(ones.keys() & others.keys())]
    if any(one.resumptions != other.resumptions for _, one, other in both):
        return ""
    return "\n".join(f"rank {rank}: other bits" for rank, *runs in both if len(set(map(_bits, runs))) > 1)


def _bits(survived: Survived) -> tuple[str, ...]:
    run = survived.run
    params = [f"{event} {digest(params)}" for event, params in run.params.items()]
    return (*params, state_digest(run.states))


def _wrongly_lost(program: Program, lost: set[int]) -> str:
    others = lost - lost_in(program)
    return f"the ranks {sorted(others)} have ended" if others else ""


def _not_recovered_from(program: Program, history: Sequence[Resumption], lost: set[int]) -> str:
    """Return whether those that are left have gone on with a rank that was lost before the end."""
    left = history[-1].left if history else tuple(range(program.ranks))
    gone_on = {
        rank
        for event in program.events
        if isinstance(event, Lose) and not event.waits
        for rank in event.ranks
    }
    return f"lost are {sorted(lost)}, and the others went on as {left}" if gone_on & set(left) else ""


# --- what must be refused -------------------------------------------------------------------------------


def _refused(program: Program, lost: set[int], left: Sequence[Survived]) -> Verdict | None:
    """Return a verdict where it was to be refused, or was in this way; None where neither."""
    must, may = _refusals(program, lost)
    failures = [each.run.failure for each in left]
    kinds = {None if failure is None else failure.kind for failure in failures}
    said = "\n".join(str(failure) for failure in failures)
    if len(kinds) == 1 and kinds <= may:
        return Verdict("refused", said)
    if must:
        return Verdict("not refused", f"expected {' or '.join(sorted(must))} of all\n{said}")
    return Verdict("refusal", said) if kinds & {TOO_FEW, STATE_LOST} else None


def _refusals(program: Program, lost: set[int]) -> tuple[set[str], set[str]]:
    """Return which errors there must be one of, and which there may be."""
    losses = [set(each.ranks) & lost for each in program.events if isinstance(each, Lose)]
    losses = [each for each in losses if each]
    divides = any("Sharded" in optimizer.option("strategy") for optimizer in program.optimizers)
    one_by_one, together = set(), set()
    if any(_ends(program, losses[:place], each) for place, each in enumerate(losses)):
        one_by_one.add(TOO_FEW)
    if lost and _ends(program, [], lost):
        together.add(TOO_FEW)
    hosts = [list(host) for host in hosts_of(program)]
    if divides and any(buddy_of(hosts, rank) in lost for rank in lost):
        (one_by_one if len(losses) == 1 else together).add(STATE_LOST)
    if len(losses) > 1:
        return set(), one_by_one | together | ({STATE_LOST} if divides else set())
    waits = any(isinstance(each, Lose) and each.waits for each in program.events)
    return set() if waits else one_by_one, one_by_one | together


def _ends(program: Program, before: Sequence[set[int]], lost: set[int]) -> bool:
    """Return whether those that are left may not go on."""
    gone = {rank for ranks in before for rank in ranks}
    hosts = [[rank for rank in host if rank not in gone] for host in hosts_of(program)]
    hosts = [host for host in hosts if host]
    return not has_quorum(hosts, [rank for host in hosts for rank in host if rank not in lost])
