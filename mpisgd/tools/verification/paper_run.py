"""`PaperRun`: trains all ranks of a job in this process, by a paper.

    params = {rank: dict(models[rank].named_parameters()) for rank in range(3)}
    optimizers = {rank: torch.optim.SGD(params[rank].values(), lr=0.1) for rank in range(3)}
    run = PaperRun(Definition(LocalSGD(H=4)), params, optimizers)
    for step in range(20):
        run.step({rank: gradients(losses(rank, step), params[rank]) for rank in range(3)})

The parameters of all ranks are then what they must be: `run.x[rank][name]`, which those given have, too.

`papers.paper_of` returns the definition of a strategy and a compressor. What a program does is told so:

    accumulation, no_sync    the sum of the gradients of all backward passes, once
    clipping, GradScaler     `between`, a function of the gradients after they were reduced
    frozen, unused           the name is absent in the gradients
    no backward on a rank    its gradients are {}, or it is absent
    joined, uneven data      `weight`
    resumed                  `load(saved)` into a new run with what `saved()` has returned
    two optimizers           two runs, each with its optimizers and their parameters
    a group is added         the names are added to `params`, of all ranks
    a lost rank              `lose(rank)`
    what nobody waits for    `event(...)`, as it was recorded
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.fusion_buffer import laid_out
from mpisgd.methods.paper_kit import Draws, Event, Paper, Slice, Vec, World, evenly, weighted
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.average_states import average_states
from mpisgd.tools.verification.draws import BucketDraws, Buckets
from mpisgd.tools.verification.paper_state import carried_over, converted, names_in

__all__ = [
    "Definition",
    "PaperRun",
    "Saved",
    "bucket_of",
    "gradients",
    "needs_closure",
    "sum_in_order",
]

Sum = Callable[[Mapping[int, Tensor]], Tensor]


def gradients(loss: Tensor, params: Mapping[str, Tensor]) -> Vec:
    """Return the gradients of a loss, by name; without those of parameters that are frozen or not used."""
    trained = {name: param for name, param in params.items() if param.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return Vec({name: grad for name, grad in zip(trained, found, strict=True) if grad is not None})


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` must be called with a closure, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def sum_in_order(tensors: Mapping[int, Tensor], order: int = 1) -> Tensor:
    """Return the sum, in the order of the ranks, or from the last to the first (order=-1).

    Numbers of less than 32 bits are added in float32.
    """
    some = list(tensors.values())[::order]
    dtype = some[0].dtype  # torch promotes no floats of 8 bits
    total = some[0].to(torch.float32 if dtype.itemsize < 4 else torch.promote_types(dtype, torch.float32))
    for tensor in some[1:]:
        total = total + tensor.to(total.dtype)
    return total


def bucket_of(x: Vec) -> Buckets:
    """Return one bucket of all parameters, the last one first, as backward has their gradients."""
    return (tuple(Slice(name, 0, x[name].numel()) for name in reversed(x)),)


class Saved(NamedTuple):
    """What a training goes on from: copies.

    Attributes:
        state: of the paper.
        x: parameters, by rank.
        optimizers: their states, by rank.
        steps: how many there were.
    """

    state: Any
    x: dict[int, Vec]
    optimizers: dict[int, dict[str, Any]]
    steps: int


class Definition(NamedTuple):
    """What a training is to be equal to: arguments of `PaperRun`.

    Attributes:
        paper: the algorithm.
        wire: the compressor's, where the algorithm takes means: exact by default.
        layout: makes buckets of the parameters that travel.
        draw: random numbers of such buckets.
    """

    paper: Paper[Any]
    wire: Paper[Any] = Synchronous()
    layout: Callable[[Vec], Buckets] = bucket_of
    draw: Callable[[Buckets, int, int | None], Draws] = BucketDraws


class PaperRun:
    """All ranks of a training, by a paper.

    Args:
        definition: the paper, and what it is given.
        params: by rank, and by name; of all ranks alike. They are overwritten after every step.
        optimizers: by rank, of these parameters; none for a paper that updates by itself.
        hosts: the ranks of each host; all on one by default.
        sum: see `World.sum`.

    Attributes:
        x: copies of the parameters after the last step, by rank and name.
        state: what the paper keeps.
        steps: how many there were.
        ranks: who is there.
    """

    def __init__(
        self,
        definition: Definition,
        params: Mapping[int, Mapping[str, Tensor]],
        optimizers: Mapping[int, torch.optim.Optimizer] | None = None,
        *,
        hosts: Sequence[Sequence[int]] = (),
        sum: Sum = sum_in_order,
    ) -> None:
        self.paper, self.steps = definition.paper, 0
        self.ranks = tuple(params)
        self._params, self._optimizers = dict(params), dict(optimizers or {})
        self._hosts = tuple(map(tuple, hosts)) or (self.ranks,)
        self._definition, self._sum = definition, sum
        self.x = {rank: self._values(rank) for rank in self.ranks}
        self.state = self.paper.start(self._seen(), self._world())

    # -- a step -------------------------------------------------------------------------------------

    def step(
        self,
        g: Mapping[int, Mapping[str, Tensor]],
        between: Callable[[Vec], Vec] = lambda g: g,
        *,
        weight: Mapping[int, float] | None = None,
    ) -> dict[int, Vec]:
        """Train a step; return the gradients that the update took.

        Args:
            g: the gradients of each rank at its parameters.
            between: of the gradients of one rank after they were reduced.
            weight: see `World.weight`.
        """
        w = self._begin(weight, {name for grads in g.values() for name in grads})
        mine = {rank: Vec(g.get(rank, {})).only(self.x[rank]) for rank in self.ranks}
        if not self.paper.weighs:
            mine, w = weighted(mine, w.weight), evenly(w)
        self.state, reduced = self.paper.reduce(self.state, mine, w)
        reduced = {rank: between(grads) for rank, grads in reduced.items()}
        self.state, x = self.paper.update(self.state, self._seen(), reduced, w)
        self._take(x)
        self._end(w)
        return reduced

    def step_with_closure(
        self,
        evaluate: Callable[[int], tuple[Tensor, Vec]],
        joined: Callable[[list[Tensor]], Tensor],
    ) -> None:
        """Train a step of optimizers that evaluate the loss several times, such as LBFGS.

        Where the paper reduces gradients, all ranks have the same parameters, and one optimizer does it.

        Args:
            evaluate: returns loss and gradients of a rank at the parameters that it has then.
            joined: what a closure returns of the losses of all ranks.
        """
        w = self._begin(None)
        mine = {rank: evaluate(rank)[1] for rank in self.ranks}
        leaders = self.ranks if self.paper.reduce(self.state, mine, w)[1] is mine else self.ranks[:1]

        def closure(leader: int) -> float:
            here, x = (leader,) if leaders == self.ranks else self.ranks, self._values(leader)
            for rank in here:
                self._put(rank, x)
            found = {rank: evaluate(rank) for rank in here}
            g = {rank: grads for rank, (_, grads) in found.items()}
            if len(here) == len(self.ranks):
                self.state, g = self.paper.reduce(self.state, g, w)
            self._give(leader, g[leader])
            return float(joined([loss for loss, _ in found.values()]))

        for leader in leaders:
            self._optimizers[leader].step(partial(closure, leader))
        after = {leader: self._values(leader) for leader in leaders}
        self.x = {rank: after[rank if rank in after else leaders[0]] for rank in self.ranks}
        self._end(w)

    def event(self, event: Event) -> None:
        """Let something happen that was recorded, in a method in which nobody waits."""
        self.state, self.x = self.paper.event(self.state, self.x, event, self._world())
        for rank in self.ranks:
            self._put(rank, self.x[rank])

    def _begin(self, weight: Mapping[int, float] | None, with_grad: Collection[str] = ()) -> World:
        """Begin a step; `with_grad`: what is frozen, and has a gradient of before, is reduced, too."""
        self.steps += 1
        before = self.x[self.ranks[0]].keys()
        self.x = {rank: Vec({**self._values(rank), **self.x[rank]}) for rank in self.ranks}
        # What was frozen until now has nothing that it could go on from.
        known = names_in(self.state) if self.paper.leaves_frozen else before
        if new := [name for name in self._seen()[self.ranks[0]] if name not in known]:
            begun = self.paper.start({rank: x.only(new) for rank, x in self.x.items()}, self._world())
            self.state = carried_over(self.state, begun, {rank: rank for rank in self.ranks})
        self.follow_dtypes()
        params = self._params[self.ranks[0]]
        reduced = [name for name in self.x[self.ranks[0]] if params[name].requires_grad or name in with_grad]
        return self._world(weight, reduced)

    def follow_dtypes(self) -> None:
        """Convert what is kept of parameters that the program has converted since the last step."""
        mine, now = self.x[self.ranks[0]], self._values(self.ranks[0])
        new = {
            name: (mine[name].dtype, now[name].dtype) for name in mine if mine[name].dtype != now[name].dtype
        }
        if new:
            self.x, self.state = converted(self.x, new), converted(self.state, new)

    def _end(self, w: World) -> None:
        x = self._seen()
        # What a method sends of parameters is of frozen ones, too, if they may have changed before.
        w = self._world(w.weight, list(x[self.ranks[0]]))
        self.state, x = self.paper.after(self.state, x, w)
        self._take(x)
        for rank in self.ranks:
            self._put(rank, self.x[rank])

    def _seen(self) -> dict[int, Vec]:
        """Return the parameters that the paper sees."""
        params = self._params[self.ranks[0]]
        frozen = [name for name, param in params.items() if not param.requires_grad]
        hidden = set(frozen) if self.paper.leaves_frozen else set()
        return {rank: x.only([name for name in x if name not in hidden]) for rank, x in self.x.items()}

    def _take(self, x: dict[int, Vec]) -> None:
        self.x = {rank: Vec({**self.x[rank], **x[rank]}) for rank in self.ranks}

    # -- other runs, other ranks --------------------------------------------------------------------

    def saved(self) -> Saved:
        """Return copies of all that a training goes on from."""
        states = {rank: optimizer.state_dict() for rank, optimizer in self._optimizers.items()}
        return copy.deepcopy(Saved(self.state, self.x, states, self.steps))

    def load(self, saved: Saved) -> None:
        """Go on from there."""
        self.state, self.x, states, self.steps = copy.deepcopy(saved)
        for rank in self.ranks:
            self._put(rank, self.x[rank])
            if rank in self._optimizers:
                self._optimizers[rank].load_state_dict(states[rank])

    def lose(self, rank: int) -> None:
        """Go on without a rank; what is to be rebuilt begins anew."""
        self.ranks = tuple(other for other in self.ranks if other != rank)
        hosts = (tuple(other for other in host if other != rank) for host in self._hosts)
        self._hosts = tuple(filter(None, hosts))
        self.x = {other: self.x[other] for other in self.ranks}
        begun = self.paper.start(self._seen(), self._world())
        self.state = carried_over(self.state, begun, {other: other for other in self.ranks})

    # -- parameters and optimizers ------------------------------------------------------------------

    def _world(
        self, weight: Mapping[int, float] | None = None, travelling: Sequence[str] | None = None
    ) -> World:
        """Return the world of this step; `travelling`: parameters that are sent, by default the trained."""
        _, wire, layout_of, draw = self._definition
        params = self._params[self.ranks[0]]
        if travelling is None:
            travelling = [name for name in self.x[self.ranks[0]] if params[name].requires_grad]

        def lay_out(names: Iterable[str]) -> Buckets:
            asked = set(names)
            return layout_of(Vec({name: x for name, x in self.x[self.ranks[0]].items() if name in asked}))

        return World(
            ranks=self.ranks,
            hosts=self._hosts,
            step=self.steps,
            weight=weight or dict.fromkeys(self.ranks, 1),
            layout=lay_out(travelling),
            lay_out=lay_out,
            sum=self._sum,
            random=draw,
            optimizer=self._optimized,
            average_state=partial(average_states, self._params, self._optimizers, self._sum),
            wire=wire,
        )

    def _values(self, rank: int) -> Vec:
        return Vec({name: param.detach().clone() for name, param in self._params[rank].items()})

    @torch.no_grad()
    def _put(self, rank: int, x: Vec) -> None:
        for name, param in self._params[rank].items():
            if name in x:
                param.copy_(x[name])

    def _give(self, rank: int, g: Vec) -> None:
        for name, param in self._params[rank].items():
            param.grad = laid_out(g[name].clone(), param) if name in g else None

    def _optimized(self, rank: int, x: Vec, g: Vec) -> Vec:
        """Return the parameters after a step of a rank's optimizer."""
        self._put(rank, x)
        self._give(rank, g)
        self._optimizers[rank].step()
        found = self._values(rank)
        if self.paper.leaves_frozen:  # those are updated all the same while they have gradients
            self.x[rank] = Vec({name: self.x[rank][name] if name in x else found[name] for name in found})
        return found.only(x)
