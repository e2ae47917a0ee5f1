"""Parameter groups by algorithm: one for matrices, and AdamW for everything else.

    {"params": [w, b], "lr": 0.1}  ->  {"params": [w], "algorithm": "muon", "lr": 0.1, ...}
                                       {"params": [b], "algorithm": "adamw", "lr": 0.1, ...}

Embeddings and heads are matrices, too, and are known by their names only.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpisgd.arguments import check_positive, shown
from mpisgd.errors import InvalidArgument
from mpisgd.sharding.elementwise import single_step

__all__ = [
    "ADAMW",
    "ALGORITHM",
    "OptimizerByAlgorithm",
    "adamw_settings",
    "by_algorithm",
    "check_rate",
    "run_step",
]

ALGORITHM, ADAMW = "algorithm", "adamw"  # the key of a group, and what it says of the rest


def by_algorithm(kind: str, params: Any, matrices: str, adamw: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return groups that have one algorithm each, and "param_names" where names were given.

    Args:
        kind: the optimizer's name, for messages.
        params: as for any torch optimizer: tensors, pairs of names and tensors, or groups of either. A group
            that has an algorithm keeps it.
        matrices: the algorithm of matrices.
        adamw: names of parameters, or of modules, whose matrices are AdamW's, too; `*` stands for anything.

    Raises:
        InvalidArgument: a name that no parameter has, names where parameters have none, or an algorithm that
            there is not, or that does not go with a parameter.
    """
    patterns = (adamw,) if isinstance(adamw, str) else tuple(adamw)
    unused = dict.fromkeys(patterns)
    groups = []
    for group in _groups_of(params):
        pairs, options = _pairs_of(group), {key: value for key, value in group.items() if key != "params"}
        if patterns and any(name is None for name, _ in pairs):
            raise InvalidArgument(
                f"{kind}: adamw={shown(list(patterns))} are names, and the parameters have none; pass "
                "model.named_parameters()"
            )
        for name, _ in pairs:
            for pattern in [each for each in unused if _matches(name or "", each)]:
                del unused[pattern]
        groups += _divided(kind, pairs, options, matrices, patterns)
    if unused:
        raise InvalidArgument(
            f"{kind}: adamw has {', '.join(map(repr, unused))}, and no parameter or module is called so; of "
            "tied parameters the first name counts"
        )
    return groups


class OptimizerByAlgorithm(torch.optim.Optimizer):
    """An optimizer whose parameter groups have one algorithm each.

    Attributes:
        _matrices: the algorithm of matrices.
        _of_algorithm: by algorithm, the settings that a group may leave out.
    """

    _matrices: ClassVar[str]
    _of_algorithm: Mapping[str, Mapping[str, Any]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later; those of a group without an "algorithm" are divided into two groups."""
        num_groups = len(self.param_groups)
        try:  # all or none
            for group in by_algorithm(type(self).__name__, [param_group], self._matrices):
                super().add_param_group({**self._of_algorithm[group[ALGORITHM]], **group})
        except BaseException:
            del self.param_groups[num_groups:]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, as other torch optimizers do.

        Raises:
            InvalidArgument: it is of groups that other algorithms update.
        """
        _check_algorithms(type(self).__name__, self.param_groups, state_dict)
        super().load_state_dict(state_dict)


def _groups_of(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise TypeError("params argument given to the optimizer should be an iterable of Tensors or dicts")
    given = [params] if isinstance(params, dict) else list(params)
    if given and isinstance(given[0], dict):
        return given
    return [{"params": given}]


def _pairs_of(group: Mapping[str, Any]) -> list[tuple[str | None, Tensor]]:
    """Return the parameters of a group, each with its name, or None."""
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("optimizer parameters need to be in an ordered collection, and a set has no order")
    listed = [params] if isinstance(params, Tensor) else list(params)
    names = group.get("param_names", ())
    pairs = [each if isinstance(each, tuple) else (None, each) for each in listed]
    return [(names[i] if i < len(names) else name, param) for i, (name, param) in enumerate(pairs)]


def _divided(
    kind: str,
    pairs: Sequence[tuple[str | None, Tensor]],
    options: Mapping[str, Any],
    matrices: str,
    patterns: Sequence[str],
) -> list[dict[str, Any]]:
    if ALGORITHM in options:
        _check(kind, pairs, options[ALGORITHM], matrices)
        return [_group(pairs, options, options[ALGORITHM])]
    parts: dict[str, list[tuple[str | None, Tensor]]] = {matrices: [], ADAMW: []}
    for name, param in pairs:
        is_rest = param.dim() != 2 or any(_matches(name or "", pattern) for pattern in patterns)
        parts[ADAMW if is_rest else matrices].append((name, param))
    return [_group(part, options, algorithm) for algorithm, part in parts.items() if part]


def _group(
    pairs: Sequence[tuple[str | None, Tensor]], options: Mapping[str, Any], algorithm: str
) -> dict[str, Any]:
    group = {**options, "params": [param for _, param in pairs], ALGORITHM: algorithm}
    names = [name for name, _ in pairs]
    return {**group, "param_names": names} if None not in names else group


def _check(kind: str, pairs: Sequence[tuple[str | None, Tensor]], algorithm: Any, matrices: str) -> None:
    if algorithm not in (matrices, ADAMW):
        raise InvalidArgument(f"{kind}: {ALGORITHM}={shown(algorithm)}; expected {matrices!r} or {ADAMW!r}")
    for name, param in pairs if algorithm == matrices else ():
        if param.dim() != 2:
            what = (
                f"a parameter of shape {tuple(param.shape)}"
                if name is None
                else f"{name} {tuple(param.shape)}"
            )
            raise InvalidArgument(f"{kind}: {what} has {ALGORITHM}={matrices!r}, which is for matrices")


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch(name, pattern)


def _check_algorithms(kind: str, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise where a state has other algorithms than the groups that are to load it.

    Raises:
        InvalidArgument: names both.
    """
    mine = [group[ALGORITHM] for group in groups]
    others = [group.get(ALGORITHM) for group in state_dict["param_groups"]]
    if mine != others:
        raise InvalidArgument(
            f"load_state_dict: this {kind} has groups by {mine}, and the state is of groups by {others}; "
            "make the optimizer as the one that was saved"
        )


def check_rate(kind: str, what: str, value: Any) -> None:
    """Raise InvalidArgument unless a number is at least 0; a tensor may have one."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0.0 <= number < float("inf"):
        raise InvalidArgument(f"{kind}: {what}={shown(value)}; expected a number of at least 0")


def adamw_settings(
    kind: str, lr: Any, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
    """Check the options of a group by AdamW, and return them.

    Raises:
        InvalidArgument: it makes none.
    """
    check_rate(kind, "adamw_lr", lr)
    check_rate(kind, "adamw_weight_decay", weight_decay)
    check_positive(kind, "adamw_eps", eps)
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in betas):
        raise InvalidArgument(f"{kind}: adamw_betas={shown(betas)}; expected two numbers from 0 to below 1")
    blank = [torch.zeros(1, requires_grad=True)]
    (group,) = torch.optim.AdamW(
        blank, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay
    ).param_groups
    return {key: value for key, value in group.items() if key != "params"}


@torch.no_grad()
def run_step(
    kind: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> None:
    """Update some groups of an optimizer by the step of one of torch's, with the state that it keeps.

    Args:
        kind: of torch's.
        optimizer: whose groups and state they are.
        groups: some of its groups, with all settings that `kind` has.
    """
    if not groups:
        return
    part = kind.__new__(kind)  # what is made in the usual way has parameters and a state of its own
    part.param_groups, part.state, part.defaults = groups, optimizer.state, {}
    single_step(part)(part)
