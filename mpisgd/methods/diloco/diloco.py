"""`DiLoCo`: ranks train by themselves for many steps, and an outer optimizer steps along the mean change.

With x_i the parameters of rank i of p, and z the outer parameters, which all ranks have alike (Douillard et
al. 2023):

    x_i <- x_i - u_i                                every step, u_i the update of the wrapped optimizer
    d   <- z - (x_1 + ... + x_p) / p                every `sync_every` steps: the outer gradient
    z   <- OuterOptimizer(z, d)
    x_i <- z

Streaming DiLoCo (Douillard et al. 2025) cuts the parameters into fragments, which are synchronised at
different steps; and the mean may be taken during the next `overlap_steps` steps, after which

    x_i <- overlap_alpha x_i + (1 - overlap_alpha) z
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_count, check_positive, check_timeout, shown
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.methods.diloco import paper
from mpisgd.methods.diloco.fragment import Fragment, Rhythm, State
from mpisgd.methods.diloco.fragments import cut, names_of_fragments
from mpisgd.methods.diloco.outer import OuterChoice
from mpisgd.methods.diloco.quorum.learner import Pace, QuorumSynchronizer
from mpisgd.methods.diloco.quorum.one_model import learners_of
from mpisgd.methods.diloco.quorum.rounds import Rule
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.strategy.example_counts import mean_in_place
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, no, no_momentum, yes
from mpisgd.methods.strategy.local_training import LOCAL_STEPS, WEIGHTED, LocalSynchronizer
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.strategy.training import Training

__all__ = ["DiLoCo"]

BUFFERS = "buffers"  # the name of their mean
GRACE_S = 10.0
WEIGHTS = ("tokens", "equal")
LEARNERS = ("rank", "host")
OF_QUORUM = ("quorum", "grace_s", "weights", "learners")  # fields
OWN_PACE = replace(
    LOCAL_STEPS,
    of="DiLoCo(quorum)",
    repeats=no("which learners an outer step has depends on timing"),
    uneven_data=no(
        "each learner has its own pace: one that has no more data calls synchronizer.finish(); leave it out"
    ),
    elastic=no("learners go on without the one that is lost; leave elastic.run out"),
    checkpoint=yes("has the model of each learner, and the outer parameters; for as many ranks"),
)
MEAN_INSIDE = no("the ranks of a learner step with the mean of their gradients")
SEVERAL_RANKS = replace(
    OWN_PACE,
    of="DiLoCo(learners)",
    op=MEAN_INSIDE,
    gradient_predivide_factor=MEAN_INSIDE,
    error_if_nonfinite=MEAN_INSIDE,
    clip_grad_norm_=yes("of the mean inside a learner"),
    grad_scaler=yes("yes, an overflow on a rank skips the step of its learner"),
    share_parameters=no("learners have parameters of their own"),
)
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Ranks train independently; every `sync_every` steps an outer optimizer applies their mean change.

    The wrapped optimizer is the inner one, with separate state on each rank. The outer step is the same on
    every rank: it acts on a copy of the parameters, and its state is kept on every rank.

    Args:
        sync_every: steps from one outer step of a parameter to the next.
        outer_optimizer: class of the outer optimizer, any of torch's that needs no closure.
        outer_options: its arguments; for SGD by default lr=0.7, momentum=0.9, nesterov=True.
        fragments: number of parts into which the parameters are divided, of about equal bytes, in the order
            of the optimizer; part f is synchronized f * sync_every / fragments steps after the first. Each
            part has at least one parameter. Parameters that are added later form a part of their own.
        overlap_steps: number of steps that the ranks take while the mean is being computed; less than
            `sync_every`.
        overlap_alpha: the weight of the parameters after these steps when they are mixed with the result of
            the outer step; 0 discards the steps.
        quorum: number of learners that an outer step needs, or "all". Each learner then trains at its own
            pace; see below. None: all ranks take each outer step together.
        grace_s: with `quorum`, how many seconds the learners of an outer step wait for the others once the
            quorum has arrived; 10 by default.
        weights: with `quorum`, the weight of a learner's change in the mean. "tokens", the default:
            examples^2 / steps, where the program passes the examples of each step to
            `optimizer.synchronizer.next_batch(examples=)`; without that, the number of steps. "equal": 1.
        learners: with `quorum`, what is a learner. "rank", the default: each rank. "host": all ranks of a
            host. A number: so many ranks of a host, side by side.

    Module buffers (`named_buffers`) are averaged whenever the first fragment is synchronized.

    With `quorum` (Decoupled DiLoCo, arXiv 2604.21428) an outer step is taken with the learners that have
    arrived: when all have, or `grace_s` after the quorum has. A learner that has not arrived by then is told
    so after its next inner step. It sends what it has changed so far, which is part of the next outer step
    together with what it changes until then, continues at once from the newest outer parameters, and takes as
    many inner steps as fit until the others arrive. A learner that is slower than the others takes fewer
    steps in each round. One that is stopped is waited for once, and again after it has continued. A change is
    the difference to the outer parameters from which the learner began, as in asynchronous local SGD (Liu et
    al. 2024). After its last step each learner calls `optimizer.synchronizer.finish()`. With `quorum="all"`
    and `weights="equal"` the result has the same bits as without `quorum`. Between hosts of several ranks the
    last digits may differ: without `quorum` each host adds up its own ranks first.

    The ranks of a learner of several have one model: they average their gradients in every step, as
    `Synchronous` does, and their first rank sends the parameters for all. `next_batch` is called on each of
    them with its own examples, which are added up. With `quorum="all"` and equal weights that is `DiLoCo`
    whose inner steps are synchronous inside each learner.

    With `quorum` the first rank of the group keeps the outer parameters, and a thread of it serves the other
    learners, so that MPI must run at thread level MULTIPLE. Steps contain no collective operation of several
    learners. Under `mpirun --with-ft ulfm` the training therefore survives the loss of any rank but the
    first, and all other collectives of the program raise `PeerLost` from then on. The loss of a rank of a
    learner of several ends the whole learner: the others of its ranks raise `LearnerLost`, which ends their
    processes and not the job, and count as lost. Where it is the first learner, its first rank goes on to
    serve the others until they have finished. Call `state_dict()` on all ranks, after the same number of
    steps: on the first rank it contains the outer parameters, and waits until the other learners have called
    it; a learner that has called it before waits in its next outer step for the first rank. A state can only
    be loaded by the same number of ranks, each of which loads what it has saved.

    Cost: every `sync_every` steps an all-reduce of the change of the parameters; each rank keeps a copy of
        the parameters and the state of the outer optimizer. With `quorum`, instead: every `sync_every` steps
        each learner sends its parameters to the first rank and receives the outer ones; in host memory the
        first rank has a copy of what each learner has sent, two further copies of the parameters, and the
        outer parameters from which late learners began.
    """

    sync_every: int = 100
    outer_optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    outer_options: Mapping[str, Any] | None = None
    fragments: int = 1
    overlap_steps: int = 0
    overlap_alpha: float = 0.5
    quorum: int | str | None = None
    grace_s: float | None = None
    weights: str | None = None
    learners: int | str = "rank"

    def __repr__(self) -> str:
        lock_step = self.quorum is None
        names = [each.name for each in fields(self) if not (lock_step and each.name in OF_QUORUM)]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @classmethod
    def examples(cls) -> Sequence["DiLoCo"]:
        """See `Strategy`."""
        plain = {"lr": 0.5, "momentum": 0.25}
        return (
            cls(2),
            cls(4, fragments=2, outer_options=plain),
            cls(3, fragments=2, overlap_steps=1, overlap_alpha=0.25),
        )

    def __post_init__(self) -> None:
        for name in ("sync_every", "fragments"):
            check_positive("DiLoCo", name, getattr(self, name), whole=True)
        check_count("DiLoCo", "overlap_steps", self.overlap_steps)
        if self.overlap_steps >= self.sync_every:
            raise InvalidArgument(
                f"DiLoCo: overlap_steps={self.overlap_steps}; expected fewer than {self.sync_every}"
            )
        if self.fragments > self.sync_every:
            raise InvalidArgument(
                f"DiLoCo: fragments={self.fragments}; expected at most sync_every={self.sync_every}"
            )
        if not isinstance(self.overlap_alpha, (int, float)) or not 0 <= self.overlap_alpha <= 1:
            raise InvalidArgument(
                f"DiLoCo: overlap_alpha={shown(self.overlap_alpha)}; expected a number from 0 to 1"
            )
        self._check_quorum()
        self._check_outer()

    def _check_quorum(self) -> None:
        quorum = self.quorum
        if quorum is None:
            for name in ("grace_s", "weights"):
                if getattr(self, name) is not None:
                    raise InvalidArgument(f"DiLoCo: {name}={shown(getattr(self, name))} goes with quorum=")
            if not isinstance(self.learners, str) or self.learners != "rank":
                raise InvalidArgument(f"DiLoCo: learners={shown(self.learners)} goes with quorum=")
            return
        is_count = isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1
        if not (is_count or (isinstance(quorum, str) and quorum == "all")):
            raise InvalidArgument(f'DiLoCo: quorum={shown(quorum)}; expected a number of learners, or "all"')
        for name, other in (("overlap_steps", 0), ("fragments", 1)):
            if getattr(self, name) != other:
                raise InvalidArgument(
                    f"DiLoCo: {name}={getattr(self, name)} does not go with quorum={shown(quorum)}: learners "
                    "send all parameters, and wait for the outer step"
                )
        waits_not = isinstance(self.grace_s, (int, float)) and self.grace_s == 0
        if self.grace_s is not None and not waits_not:
            check_timeout("DiLoCo", "grace_s", self.grace_s)
        if self.weights is not None and not (isinstance(self.weights, str) and self.weights in WEIGHTS):
            raise InvalidArgument(f"DiLoCo: weights={shown(self.weights)}; expected one of {WEIGHTS}")
        if isinstance(self.learners, str) and self.learners in LEARNERS:
            return
        if not isinstance(self.learners, int) or isinstance(self.learners, bool) or self.learners < 1:
            raise InvalidArgument(
                f"DiLoCo: learners={shown(self.learners)}; expected one of {LEARNERS}, or a number of ranks"
            )

    def _rule(self, size: int) -> Rule:
        """Return when an outer step of so many learners is due, with `quorum`."""
        assert self.quorum is not None
        quorum = size if isinstance(self.quorum, str) else self.quorum
        return Rule(quorum, GRACE_S if self.grace_s is None else self.grace_s, self.weights != "equal")

    def _check_outer(self) -> None:
        cls = self.outer_optimizer
        if not inspect.isclass(cls) or not issubclass(cls, torch.optim.Optimizer):
            raise InvalidArgument(
                f"DiLoCo: outer_optimizer={shown(cls)}; expected a class such as torch.optim.SGD, whose "
                "arguments are outer_options={...}"
            )
        self.make_outer([torch.zeros(1)])

    @classmethod
    def slow_momentum(cls, sync_every: int, *, momentum: float = 0.5, lr: float = 1.0) -> "DiLoCo":
        """Return SlowMo (Wang et al. 2020), which is DiLoCo with plain momentum in the outer SGD.

        The momentum buffer is that of the paper times the inner learning rate; this makes no difference as
        long as the learning rate is constant.

        Args:
            sync_every: tau of the paper.
            momentum: beta.
            lr: alpha.
        """
        return cls(sync_every, outer_options={"lr": lr, "momentum": momentum})

    @property
    def chosen_options(self) -> Mapping[str, Any]:
        """The arguments of the outer optimizer, defaults included."""
        if self.outer_options is None:
            return NESTEROV if self.outer_optimizer is torch.optim.SGD else {}
        return self.outer_options

    def make_outer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return a new outer optimizer that updates `params`.

        Raises:
            InvalidArgument: the class `outer_optimizer` does not accept `outer_options`.
        """
        options = self.outer_options
        if options is not None and not isinstance(options, Mapping):
            raise InvalidArgument(
                f"DiLoCo: outer_options={shown(options)}; expected a dict such as {NESTEROV}"
            )
        options = self.chosen_options
        make: Callable[..., torch.optim.Optimizer] = self.outer_optimizer
        try:
            return make(params, **options)
        except (TypeError, ValueError) as exc:
            raise InvalidArgument(f"DiLoCo: outer_options={shown(options)}: {exc}") from exc

    @property
    def _outer_choice(self) -> OuterChoice:
        """The outer optimizer that is asked for."""
        kind = self.outer_optimizer
        return OuterChoice(self.make_outer, self.chosen_options, f"{kind.__module__}.{kind.__qualname__}")

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        if self.quorum is not None:
            return OWN_PACE if self.learners == "rank" else SEVERAL_RANKS
        elastic = yes("survivors go on from their own models, with the outer momentum")
        compression = Compressions("of changes", (no_momentum,))
        return replace(LOCAL_STEPS, compression=compression, uneven_data=yes(WEIGHTED), elastic=elastic)

    def check(self, training: Training) -> None:
        """Raise if this strategy cannot train the parameters; see `Strategy.check`.

        Raises:
            InvalidArgument: says why; one reason is fewer parameters than fragments.
        """
        super().check(training)
        number = len(training.named)
        if self.fragments > max(1, number):
            raise InvalidArgument(
                f"DiLoCo: fragments={self.fragments}, and the optimizer has {number} parameters, which are "
                f"not cut; expected at most {max(1, number)}"
            )

    def check_ranks(self, training: Training) -> None:
        """Raise if there are fewer learners than the quorum, or if the thread level of MPI is too low.

        Raises:
            InvalidArgument: then, and where a host's ranks cannot be divided into learners.
        """
        if self.quorum is None:
            return
        group = training.group
        count = len(learners_of(group.topology, self.learners))
        if isinstance(self.quorum, int) and self.quorum > count:
            each = {"rank": "each rank is one", "host": "each host is one"}
            raise InvalidArgument(
                f"DiLoCo: quorum={self.quorum}, and there are {count} learners: "
                + each.get(str(self.learners), f"{self.learners} ranks are one")
            )
        if self.learners != "rank" and any(param.device.type != "cpu" for param in training.params):
            raise InvalidArgument(
                f"DiLoCo: learners={self.learners!r} is for parameters on the CPU; with GPUs each rank is one"
            )
        if group.size > 1 and not group.queue.threads_allowed:
            raise InvalidArgument(
                f"DiLoCo: quorum={self.quorum!r} needs an MPI that runs at thread level MULTIPLE; this one "
                "does not"
            )

    def synchronizer(self, training: Training) -> LocalSynchronizer:
        """Return the working part, which takes the outer steps."""
        if self.quorum is not None:
            rule = self._rule(len(learners_of(training.group.topology, self.learners)))
            pace = Pace(self.sync_every, rule, self._outer_choice, self.learners)
            return QuorumSynchronizer(training, pace)
        return DiLoCoSynchronizer(training, self)

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any] | None:
        """See `Strategy`."""
        if self.quorum not in (None, "all"):  # its events are repeated, see `tools.verification.replay`
            return super().paper(size, lengths)
        given = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        if self.outer_options is not None:
            given = {"lr": 1e-3, "momentum": 0.0, "nesterov": False, **self.outer_options}
        lr, mu, nesterov = given.pop("lr"), given.pop("momentum"), given.pop("nesterov")
        if given or self.outer_optimizer is not torch.optim.SGD:
            return super().paper(size, lengths)
        return paper.DiLoCo(
            H=self.sync_every,
            lr=lr,
            mu=mu,
            nesterov=bool(nesterov),
            fragments=names_of_fragments(lengths, self.fragments) if self.fragments > 1 else (),
            tau=self.overlap_steps,
            alpha=self.overlap_alpha,
            ranks={"rank": 1, "host": 0}.get(self.learners, self.learners),  # type: ignore[arg-type]
        )


class DiLoCoSynchronizer(LocalSynchronizer):
    """Synchronises fragments after the steps that `DiLoCo` names."""

    def __init__(self, training: Training, strategy: DiLoCo) -> None:
        super().__init__(training)
        self._strategy = strategy
        self._fragments: list[Fragment] = []
        self.state = State()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Synchronizer`: what is there already is of an earlier wave."""
        super().begin(tensors)
        waves = self.state.waves
        waves.update(dict.fromkeys(tensors, max(waves.values(), default=-1) + 1))

    def derive(self) -> None:
        """Make the fragments: those of the first parameters, and one of each later wave."""
        self.arrive()
        state, strategy, params = self.state, self._strategy, self.tensors()
        choice = strategy._outer_choice
        rhythm = Rhythm(strategy.sync_every, strategy.overlap_steps, strategy.overlap_alpha)
        if state.kind != choice.kind:
            state.kind, state.entries, state.options = choice.kind, {}, {}
        self._fragments = []
        state.compression.move_to([])
        for wave in sorted(set(state.waves.values())):
            added = {key: tensor for key, tensor in params.items() if state.waves[key] == wave}
            parts = [added] if wave else cut(added, strategy.fragments)
            for place, each in enumerate(parts):
                first = place * strategy.sync_every // strategy.fragments
                number = len(self._fragments)
                state.examples.begin(str(number), again=False)
                self._fragments.append(Fragment(number, each, first, state, self.training, rhythm, choice))

    def arrive(self) -> None:
        """See `Synchronizer`."""
        with contextlib.ExitStack() as each:  # also of the others, where one was sent by a rank that is lost
            for fragment in self._fragments:
                each.callback(fragment.arrive)
                fragment.note_options()

    def synchronize(self) -> None:
        """Begin and finish what is due. Collective where anything is."""
        self.state.examples.note(self.step_examples)
        if due := [fragment for fragment in self._fragments if fragment.is_due(self.num_steps)]:
            params = self.tensors()
            for fragment in due:
                fragment.after(self.num_steps, params)
        if self.num_steps % self._strategy.sync_every == 0:
            group = self.training.group
            mean_in_place(self.buffers, self.state.examples.of_mean(BUFFERS, group), group)

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """See `Synchronizer`: the outer parameters, and the mean of the buffers."""
        return {**super().consensus_of(replicas, entries), **entries[0]["alike"]["outer"]}

    def consensus(self) -> list[Tensor]:
        """Return the outer parameters, and the mean of the buffers. Collective."""
        if not self.state.outer:
            return list(super().consensus())
        buffers = [tensor.clone() for tensor in self.buffers]
        all_reduce_coalesced(buffers, ReduceOp.AVG, self.training.group)
        return [*self.completed(self.state.outer), *buffers]
