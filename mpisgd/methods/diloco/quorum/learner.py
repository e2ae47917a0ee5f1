"""`QuorumSynchronizer`: a learner of `DiLoCo(quorum=)`, which trains at its own pace.

Each rank is a learner, or those of a host are, of which the first one speaks for all; see `one_model`. The
first rank of the group has the outer parameters, too, and a thread that serves all learners; see `syncer`. No
step has a collective operation of learners in it, but the first one, and the first after a load: so a learner
that is lost, stopped or slow is waited for by the quorum and the grace alone. One without which an outer step
was taken sends its parameters before it has taken all its steps; see `rounds`.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from mpisgd.arguments import check_positive
from mpisgd.collectives.coalesced import broadcast_coalesced
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveTimeout, InvalidArgument, PeerLost
from mpisgd.event_log import Entry, EventLog, Place, grads_of
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.method_state import REBUILD, own
from mpisgd.methods.diloco.outer import OuterChoice, OuterOptimizer
from mpisgd.methods.diloco.quorum.link import Link
from mpisgd.methods.diloco.quorum.messages import (
    CLOSE,
    DONE,
    ENTER,
    FEW,
    MIXED,
    OTHER_STATE,
    SAVE,
    STALLED,
    TAKE,
    Said,
    Told,
)
from mpisgd.methods.diloco.quorum.one_model import OneModel
from mpisgd.methods.diloco.quorum.rounds import Contribution, Rounds, Rule
from mpisgd.methods.diloco.quorum.syncer import PLACE, Syncer
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.methods.strategy.local_training import LocalSynchronizer
from mpisgd.methods.strategy.replicated import reducer_of
from mpisgd.methods.strategy.training import Training
from mpisgd.threads.scheduling import now_s
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff

__all__ = ["Pace", "QuorumSynchronizer"]

NO_LIMIT_S = float("inf")
PATIENCE = 2  # times the timeout, which the first rank of a learner waits


class Pace(NamedTuple):
    """What a learner needs to know of the strategy.

    Attributes:
        sync_every: steps from one time that it sends its parameters to the next; fewer after it was late.
        rule: when an outer step is due.
        outer: the outer optimizer.
        learners: which ranks are one; see `one_model.learners_of`.
    """

    sync_every: int
    rule: Rule
    outer: OuterChoice
    learners: int | str = "rank"


@dataclass
class _State:
    """What is kept from step to step; all of it is a rank's own. Ranks of a learner have the same.

    Attributes:
        version: of the outer parameters that this learner began from.
        steps: that it has taken since.
        examples: that these were of.
        counted: how many of the steps had a number of examples.
        outer: on the first rank, what `Rounds` has: "version", "kind", "newest", "entries", "options",
            "pending", "missing", "based" and "bases"; {} elsewhere.
    """

    version: int = own(0, lost=REBUILD)
    steps: int = own(0, lost=REBUILD)
    examples: int = own(0, lost=REBUILD)
    counted: int = own(0, lost=REBUILD)
    outer: dict[str, Any] = own(default_factory=dict, lost=REBUILD)


class QuorumSynchronizer(LocalSynchronizer):
    """Sends this learner's parameters, and goes on from the outer ones: every `sync_every` steps, if in time.

    Attributes:
        events: what is recorded of this learner, on its first rank, if anything: see `mpisgd.event_log`.
        outer_events: what is recorded of the outer parameters, on the first rank.
    """

    events: EventLog | None = None
    outer_events: EventLog | None = None

    def __init__(self, training: Training, pace: Pace) -> None:
        super().__init__(training)
        self._pace = pace
        self.state = _State()
        self._has_begun = False
        self._link: Link | None = None  # of the first rank of a learner
        self._syncer: Syncer | None = None
        self._communicator: GroupCommunicator | None = None
        self._next_examples = 0
        self._is_done = False
        self._began_s = 0.0  # when it took the outer parameters
        self._until_s: float | None = None  # when it comes to the next outer step; None: after all its steps
        self._untimed = 0  # of the steps since, those before it: the first one, and those before a load
        self._grads: dict[str, Tensor] = {}  # that are recorded

    @property
    def method(self) -> str:
        """See `Synchronizer`: a state of the lock-step method is another one's."""
        return "DiLoCo(quorum)"

    @property
    def why_fixed(self) -> str:
        """See `Synchronizer`: the first rank has the outer parameters, and others their own versions."""
        return "DiLoCo(quorum=) goes on without ranks that are lost; leave elastic.run and rebuild() out"

    # -- the beginning and the end ------------------------------------------------------------------

    def open(self) -> None:
        """Let the ranks of this learner find each other; the loss of one of them ends it."""
        self._model = OneModel(self.training.group, self._pace.learners)
        if (group := self._model.group) is not None:
            training = self.training._replace(group=group)
            self.gradients: GradientSync = reducer_of(training, CompressionState())
        if (scope := self._model.scope) is not None:
            scope.at_loss.append(self._be_lost)

    @property
    def model_group(self) -> Group:
        """See `Synchronizer`: the ranks of this learner."""
        return self.training.group if self._model.group is None else self._model.group

    def _be_lost(self) -> None:
        """Tell the others that this learner ends, and no other one; on any thread."""
        if (link := self._link) is not None:
            link.give_up()
        self.training.group.job.leaving.append(self._serve_out)

    def _serve_out(self) -> None:
        """Serve the others to their end, where this rank has the outer parameters."""
        if self._syncer is not None:
            self._syncer.join()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin: the first rank's parameters are the outer ones.

        Raises:
            InvalidArgument: a state was loaded, and some rank has none of its own; on every rank.
        """
        if self.num_steps:
            raise InvalidArgument(
                "DiLoCo(quorum=): the state that was loaded is of another number of ranks, or of one rank "
                "alone; let each of as many ranks load what it has saved, or load the model alone, and begin "
                "with its parameters"
            )
        self._model.begin(list(tensors.values()))

    def derive(self) -> None:
        """Begin the exchanges, after those of before have ended. Collective."""
        self.close()
        self._is_done = False
        group, params = self.training.group, self.tensors()
        made: list[GroupCommunicator | None] = []
        communicator, firsts = group.queue.communicator, self._model.firsts
        operation = Operation("DiLoCo", extra="start of its rounds")
        group.queue.run(operation, lambda: made.append(communicator.subset(firsts, apart=True)))
        (self._communicator,) = made
        self._form = form = FlatCopy([*params.values(), *self.buffers])
        self._has_begun = True
        group.job.at_end.append(self._end)
        self._began_s, self._until_s, self._untimed = now_s(), None, self.state.steps + 1
        self.is_fresh = False
        if self._communicator is None:
            return
        if group.rank == 0:
            rounds = self._make_rounds(form, list(params))
            self._syncer = Syncer(
                self._communicator,
                rounds,
                self._pace.rule.quorum,
                group.queue.consistency.timeout_s,
                self.outer_events,
                lambda: not group.is_usable,
            )
        limit_s = group.queue.consistency.timeout_s
        check = self._model.check
        self._link = Link(self._communicator, form, group.name, group.ranks[0], limit_s, check)

    def _make_rounds(self, form: FlatCopy, keys: Sequence[str]) -> Rounds:
        """Make the outer parameters, from the state where that has some."""
        pace, saved, newest = self._pace, self.state.outer, form.new_like()
        newest.load(saved["newest"] if saved else [*self.tensors().values(), *self.buffers])
        same = bool(saved) and saved["kind"] == pace.outer.kind
        entries: dict[str, dict[str, Any]] = saved["entries"] if same else {}
        outer = OuterOptimizer(
            pace.outer,
            dict(zip(keys, newest.tensors[: len(keys)], strict=True)),
            entries,
            saved["options"] if same else {},
        )
        rounds = Rounds(pace.rule, keys, newest, outer, len(self._model.firsts))
        if saved:
            rounds.version, rounds.missing = saved["version"], set(saved["missing"])
            rounds.based = dict(saved["based"])
            rounds.bases = {version: _copy_of(base, form) for version, base in saved["bases"]}
            rounds.pending += [
                Contribution(**{**each, "changes": _copy_of(each["changes"], form)})
                for each in saved["pending"]
            ]
        return rounds

    def close(self) -> None:
        """End the exchanges. Collective, unless a rank is lost."""
        if self._has_begun:
            self.training.group.job.at_end.remove(self._end)
            self._end()

    def _end(self) -> None:
        self._has_begun = False
        link, self._link = self._link, None
        if link is None:
            return
        is_lost = self._model.scope is not None and self._model.scope.error is not None
        try:
            if not self._is_done and not is_lost:
                self._take(link.ask(Said(CLOSE)), into=None)
        finally:
            link.close()
        assert self._communicator is not None
        if self._syncer is not None:
            self._syncer.join()
            self._syncer = None
        if self.training.group.queue.broken is None and not is_lost:
            self._communicator.free()
        self._communicator = None

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `Synchronizer`.

        Raises:
            InvalidArgument: on every rank.
        """
        raise InvalidArgument(
            "DiLoCo(quorum=): parameters cannot be added, since learners are at different steps; make the "
            "optimizer with all of them, some with requires_grad=False"
        )

    # -- a step -------------------------------------------------------------------------------------

    def next_batch(self, *, examples: int) -> None:
        """Set the number of examples (or tokens) of this rank's next backward pass, for `weights="tokens"`.

        Those of several passes before a step are added up, and so are those of the ranks of a learner. All
        ranks call it before every step, or none.
        """
        check_positive("next_batch", "examples", examples, whole=True)
        self._next_examples += examples

    def before_step(self) -> None:
        """See `LocalSynchronizer`."""
        if self._is_done:
            raise InvalidArgument("DiLoCo(quorum=): step() after synchronizer.finish()")
        super().before_step()
        if self.events is not None:
            self._grads = grads_of(self.training.named)

    def synchronize(self) -> None:
        """Count a step; send the parameters where that is due, and go on from the outer parameters."""
        state, examples = self.state, self._next_examples
        self._next_examples = 0
        state.steps += 1
        examples, is_due = self._model.count(examples, state.steps >= self._pace.sync_every or self._is_due())
        state.examples += examples or 1
        state.counted += examples > 0
        if self.events is not None:
            self._record("step", {**self._grads, "examples of the step": torch.tensor(examples or 1)})
            self._grads = {}
        if not is_due:
            return
        if self._pace.rule.by_examples and state.counted not in (0, state.steps):
            raise InvalidArgument(
                "DiLoCo(quorum=): next_batch(examples=) was called before some of the steps since the last "
                'outer step, and not before others; call it before all, or take weights="equal"'
            )
        self._enter()

    def _is_due(self) -> bool:
        """Return whether to come before all steps are taken: since others are ahead, or are about to come."""
        if self._link is None:
            return False
        if self._link.is_behind(self.state.version):
            return True
        if self._until_s is None:
            return False
        half_step_s: float = (now_s() - self._began_s) / self.state.steps / 2
        return now_s() + half_step_s >= self._until_s

    def _enter(self) -> None:
        state, form, params = self.state, self._usable_form(), self.tensors()
        if not form.fits([*params.values(), *self.buffers]):
            raise InvalidArgument(
                "DiLoCo(quorum=): parameters have other dtypes or shapes than at the first step; convert the "
                "model before the optimizer is made"
            )
        self._model.average(self.buffers)
        form.load([*params.values(), *self.buffers])
        said = Said(
            ENTER, state.version, state.steps, state.examples, int(state.counted > 0), self._full_us()
        )
        limit_s = PATIENCE * self.training.group.queue.consistency.timeout_s
        told = self._model.led(lambda: self._own_link.ask(said, sends=True), form, limit_s)
        self._take(told, into=params)
        state.steps = state.examples = state.counted = 0
        self._began_s, self._untimed = now_s(), 0
        self._until_s = None if told.left_us < 0 else self._began_s + told.left_us / 1e6

    def _full_us(self) -> int:
        """Return how many microseconds all its steps take, where this learner has taken them; 0 elsewhere."""
        steps, timed = self.state.steps, self.state.steps - self._untimed
        if steps < self._pace.sync_every or timed < 1:
            return 0
        return max(1, int((now_s() - self._began_s) * 1e6 * steps / timed))

    def _usable_form(self) -> FlatCopy:
        self._model.check()
        if not self._has_begun:
            raise InvalidArgument("DiLoCo(quorum=): its exchanges were ended by mpisgd.shutdown()")
        return self._form

    @property
    def _own_link(self) -> Link:
        assert self._link is not None
        return self._link

    def _take(self, told: Told, into: Mapping[str, Tensor] | None) -> None:
        """Go on from what was received; `into` None: leave the parameters as they are."""
        if told.kind != TAKE:
            self._raise(told)
        if into is None:
            return
        self._record("enter", number=told.entered)
        self._record("take", number=told.taken)
        self._form.unload([*into.values(), *self.buffers])
        self.state.version = told.version

    def _raise(self, told: Told) -> NoReturn:
        quorum = self._pace.rule.quorum
        if told.kind == FEW:
            raise PeerLost(
                f"DiLoCo(quorum={quorum}): {told.left} learners are left of {len(self._model.firsts)}, so "
                "that there is no quorum any more"
            )
        if told.kind == STALLED:
            group = self.training.group
            late = group.ranks[self._model.firsts[told.late]]
            raise CollectiveTimeout(
                f"DiLoCo(quorum=): rank {late} has not called synchronizer.finish(), and "
                f"no learner has come to an outer step for {group.queue.consistency.timeout_s:.1f} s"
            )
        if told.kind == MIXED:
            raise InvalidArgument(
                "DiLoCo(quorum=): some learners have called next_batch(examples=), and others have not; call "
                'it on all, or take weights="equal"'
            )
        if told.kind == OTHER_STATE:
            raise InvalidArgument(
                "DiLoCo(quorum=): some learner goes on from outer parameters that the first rank has never "
                "had; let each rank load what it has saved, all of them at the same step"
            )
        if self._syncer is not None and self._syncer.error is not None:
            raise self._syncer.error
        raise PeerLost("DiLoCo(quorum=): rank 0 of the group has failed, which has the outer parameters")

    def _record(self, what: str, g: Mapping[str, Tensor] | None = None, number: int | None = None) -> None:
        if self.events is not None and number != 0 and self._model.leads:
            place = None if number is None else Place(PLACE, number)
            learner = self._model.firsts.index(self.training.group.rank)
            self.events.add(Entry(what, (learner,), g or {}, place=place))

    @torch.no_grad()
    def finish(self) -> None:
        """Tell the others that this learner makes no more steps; return with the last outer parameters.

        Waits until every other learner that is not lost has called it, too. Steps since this learner's last
        outer step stay out, as they do of the consensus of any `DiLoCo`.

        Raises:
            CollectiveTimeout: a learner has not, and none has come to an outer step for the group's timeout.
        """
        self._model.check()
        if not self._has_begun or self._is_done:
            raise InvalidArgument("DiLoCo(quorum=): finish() comes once, after the last step")

        def ask() -> Told:
            return self._own_link.ask(Said(DONE), limit_s=NO_LIMIT_S)  # the syncer ends it

        told = self._model.led(ask, self._form, NO_LIMIT_S)
        self._is_done = True
        self._take(told._replace(entered=0), into=self.tensors())

    # -- save and load ------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Copy what the first rank has of the outer parameters into its state, where they belong to it.

        It waits until the other learners that are left are here, too, after as many steps; what they bring
        after that is noted later. So where all ranks save at the same step, what they save goes together.

        Raises:
            CollectiveTimeout: they are not.
        """
        if self.is_fresh or self._link is None or self._is_done:
            return
        if self._syncer is None:
            with contextlib.suppress(PeerLost):  # the next outer step tells
                self._link.tell(Said(SAVE, steps=self.num_steps))
            return
        syncer = self._syncer
        try:
            self._wait_for_saves(syncer)
            with syncer.lock:
                self.state.outer = self._saved(syncer.rounds)
        finally:
            syncer.end_save(self.num_steps)

    def _wait_for_saves(self, syncer: Syncer) -> None:
        limit_s = self.training.group.queue.consistency.timeout_s
        reason = WaitReason("learners of DiLoCo whose state is not being saved", self.training.group.name)
        if not Backoff(limit_s).wait_for(lambda: syncer.have_saved(self.num_steps), about=lambda: reason):
            raise CollectiveTimeout(
                f"DiLoCo(quorum=): waited {limit_s:.1f} s for learners whose state is not being saved; call "
                "state_dict() on all ranks, after as many steps"
            )
        if syncer.error is not None:
            raise syncer.error

    def _saved(self, rounds: Rounds) -> dict[str, Any]:
        return {
            "version": rounds.version,
            "kind": self._pace.outer.kind,
            "newest": _clones(rounds.newest),
            "entries": {
                key: {n: v.clone() if isinstance(v, Tensor) else v for n, v in entry.items()}
                for key, entry in rounds.outer.entries.items()
            },
            "options": rounds.outer.options,
            "missing": sorted(rounds.missing),
            "based": [list(pair) for pair in rounds.based.items()],
            "bases": [[version, _clones(base)] for version, base in rounds.bases.items()],
            "pending": [{**each._asdict(), "changes": _clones(each.changes)} for each in rounds.pending],
        }

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """See `Synchronizer`: the outer parameters and their buffers."""
        outer = (entries[0]["own"] or {}).get("outer")
        if not outer:
            return super().consensus_of(replicas, entries)
        return dict(zip(replicas[0], outer["newest"], strict=True))

    def consensus(self) -> list[Tensor]:
        """Return the outer parameters and their buffers, as they are on the first rank now. Collective."""
        if not self._has_begun or self.is_fresh:
            return list(super().consensus())
        group, newest = self.training.group, self._form.new_like()
        if self._syncer is not None:
            with self._syncer.lock:
                newest.copy_(self._syncer.rounds.newest)
        broadcast_coalesced([newest.memory], group.ranks[0], group)
        averaged = self.averaged
        return [mine.to(like.device) for mine, like in zip(newest.tensors, averaged, strict=True)]


def _clones(copy: FlatCopy) -> list[Tensor]:
    return [tensor.clone() for tensor in copy.tensors]


def _copy_of(tensors: Sequence[Tensor], form: FlatCopy) -> FlatCopy:
    copy = form.new_like()
    copy.load(tensors)
    return copy
