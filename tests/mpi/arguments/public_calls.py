"""Every public function with arguments that are right, and what else each argument takes.

A function that is new in `mpisgd.__all__` needs a line here: `test_every_public_function_has_a_line` says so.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import junk
import torch
from junk import Predicate, either, flag, nothing, positive, positive_int, tensor_like, writable

import mpisgd
import mpisgd.data
from mpisgd import checkpoint, elastic
from mpisgd.job.lifecycle import world

NUMEL = 4
NO_SUCH = "no_such_argument"
FLOAT = torch.float32


@dataclass(frozen=True)
class Call:
    """A public function.

    Attributes:
        function: what is called.
        good: arguments that are right, made anew for every call.
        takes: of an argument, whether a value that looks like junk is none.
        said_as: of an argument, what else an error may call it: the part that was wrong.
        together: arguments whose junk all ranks find out together, so that one rank alone would wait.
        none_at_all: arguments that are right where all of them are empty lists.
        min_size: ranks without which there are no right arguments.
    """

    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    takes: Mapping[str, Predicate] = field(default_factory=dict)
    said_as: Mapping[str, str] = field(default_factory=dict)
    together: tuple[str, ...] = ()
    none_at_all: tuple[str, ...] = ()
    min_size: int = 1

    def is_right(self, name: str, value: Any) -> bool:
        """Whether `value` is no mistake for the argument `name`."""
        takes = self.takes.get(name) or USUAL.get(name)
        assert takes is not None, f"say in the table what {self.function.__name__}({name}=) takes"
        return takes(value)

    def mistakes(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """What of some arguments is wrong; a name that there is not always is."""
        none = all(name in drawn and junk.empty_list(drawn[name]) for name in self.none_at_all)
        right = self.none_at_all if none else ()
        return {
            name: value
            for name, value in drawn.items()
            if name == NO_SUCH or (name not in right and not self.is_right(name, value))
        }


# What an argument of this name takes, unless the function has more to say.
USUAL: dict[str, Predicate] = {
    "group": nothing,
    "async_op": flag,
    "op": lambda value: False,
    "src": lambda value: junk.rank_of(mpisgd.size())(value),
    "dst": lambda value: junk.rank_of(mpisgd.size())(value),
    "tag": lambda value: isinstance(value, int) and 0 <= value < 2**20,
    "timeout_s": either(nothing, positive),
    "tensor": junk.dense,
    "algorithm": lambda value: False,
    "obj": junk.anything,
    "seed": junk.seed,
}


def ones(numel: int = NUMEL) -> torch.Tensor:
    return torch.ones(numel)


def joined() -> torch.Tensor:
    return torch.ones(NUMEL * mpisgd.size())


def one_each() -> list[torch.Tensor]:
    return [torch.ones(NUMEL) for _ in range(mpisgd.size())]


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 3)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1)


def module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def own_rank() -> int:
    return mpisgd.rank()


def dataset() -> torch.utils.data.Dataset[Any]:
    return torch.utils.data.TensorDataset(torch.arange(8.0))


def as_many_of_any_size(value: Any) -> bool:
    listed = isinstance(value, list) and len(value) == mpisgd.size() and all(map(writable, value))
    return listed and all(tensor.dtype == FLOAT for tensor in value)


def as_many(value: Any) -> bool:
    """A list of `size` dense tensors, as `one_each` has them."""
    return isinstance(value, list) and len(value) == mpisgd.size() and all(map(fits_output, value))


def fits_output(value: Any) -> bool:
    return tensor_like(NUMEL, FLOAT, output=True)(value)


def fits(value: Any) -> bool:
    return tensor_like(NUMEL, FLOAT)(value)


def fits_joined(value: Any) -> bool:
    return tensor_like(NUMEL * mpisgd.size(), FLOAT, output=True)(value)


def reads_joined(value: Any) -> bool:
    return tensor_like(NUMEL * mpisgd.size(), FLOAT)(value)


def dense_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(writable, value))


def floating(value: Any) -> bool:
    return writable(value) and value.dtype.is_floating_point


def floating_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(floating, value))


def splits(value: Any) -> bool:
    return value is None or repr(value) == repr([NUMEL] * mpisgd.size())


def some_path() -> Path:
    return Path(tempfile.gettempdir()) / "never written"


def nowhere() -> str:
    """A folder that can be neither read nor made."""
    return "/dev/null/checkpoints"


def has_length(value: Any) -> bool:
    """What passes for a map-style data set: anything with a length and items by index."""
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


def context_parallel(
    mesh: Any, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
) -> None:
    """Enter, and leave."""
    options = {"buffer_seq_dims": buffer_seq_dims, "no_restore_buffers": no_restore_buffers}
    with mpisgd.context_parallel(mesh, buffers=buffers, **options):
        pass


def group_of_others() -> mpisgd.Group:
    """A group of which this rank is no member."""
    group = mpisgd.Group("others", [0], None, costs=None)
    group.job = world().job
    return group


CALLS: dict[str, Call] = {
    "all_reduce": Call(mpisgd.all_reduce, lambda: {"tensor": ones()}, {"tensor": writable}),
    "all_reduce_coalesced": Call(
        mpisgd.all_reduce_coalesced, lambda: {"tensors": [ones()]}, {"tensors": dense_list}
    ),
    "neighbor_all_reduce": Call(
        mpisgd.neighbor_all_reduce,
        lambda: {"tensor": ones(), "topology": "ring"},
        {"tensor": floating, "topology": lambda _: False, "step": junk.natural},
    ),
    "neighbor_all_reduce_coalesced": Call(
        mpisgd.neighbor_all_reduce_coalesced,
        lambda: {"tensors": [ones()], "topology": "ring"},
        {"tensors": floating_list, "topology": lambda _: False, "step": junk.natural},
    ),
    "broadcast": Call(mpisgd.broadcast, lambda: {"tensor": ones(), "src": 0}, {"tensor": writable}),
    "broadcast_coalesced": Call(
        mpisgd.broadcast_coalesced, lambda: {"tensors": [ones()], "src": 0}, {"tensors": dense_list}
    ),
    "reduce": Call(mpisgd.reduce, lambda: {"tensor": ones(), "dst": 0}, {"tensor": writable}),
    "gather": Call(
        mpisgd.gather,
        lambda: {"tensor": ones(), "gather_list": one_each(), "dst": own_rank()},
        {"tensor": fits, "gather_list": as_many},
        {"tensor": "gather_list", "dst": "gather_list"},
    ),
    "scatter": Call(
        mpisgd.scatter,
        lambda: {"tensor": ones(), "scatter_list": one_each(), "src": own_rank()},
        {"tensor": fits_output, "scatter_list": as_many},
        {"tensor": "scatter_list", "src": "scatter_list"},
    ),
    "all_gather": Call(
        mpisgd.all_gather,
        lambda: {"tensor_list": one_each(), "tensor": ones()},
        {"tensor_list": as_many, "tensor": fits},
        {"tensor": "tensor_list"},
    ),
    "all_gather_into_tensor": Call(
        mpisgd.all_gather_into_tensor,
        lambda: {"output_tensor": joined(), "input_tensor": ones()},
        {"output_tensor": fits_joined, "input_tensor": fits},
        {"input_tensor": "output_tensor"},
    ),
    "all_gather_into_tensor_coalesced": Call(
        mpisgd.all_gather_into_tensor_coalesced,
        lambda: {"output_tensors": [joined()], "input_tensors": [ones()]},
        {"output_tensors": lambda _: False, "input_tensors": lambda _: False},
        {"input_tensors": "output_tensor", "output_tensors": "output_tensor"},
        none_at_all=("output_tensors", "input_tensors"),
    ),
    "reduce_scatter": Call(
        mpisgd.reduce_scatter,
        lambda: {"output": ones(), "input_list": one_each()},
        {"output": fits_output, "input_list": as_many},
        {"output": "input_list"},
    ),
    "reduce_scatter_tensor": Call(
        mpisgd.reduce_scatter_tensor,
        lambda: {"output": ones(), "input": joined()},
        {"output": fits_output, "input": reads_joined},
        {"output": "input"},
    ),
    "reduce_scatter_tensor_coalesced": Call(
        mpisgd.reduce_scatter_tensor_coalesced,
        lambda: {"output_tensors": [ones()], "input_tensors": [joined()]},
        {"output_tensors": lambda _: False, "input_tensors": lambda _: False},
        {"input_tensors": "input", "output_tensors": "input"},
        none_at_all=("output_tensors", "input_tensors"),
    ),
    "all_to_all": Call(
        mpisgd.all_to_all,
        lambda: {"output_tensor_list": one_each(), "input_tensor_list": one_each()},
        {"output_tensor_list": as_many_of_any_size, "input_tensor_list": as_many_of_any_size},
        {"input_tensor_list": "output_tensor_list"},
    ),
    "all_to_all_single": Call(
        mpisgd.all_to_all_single,
        lambda: {
            "output": joined(),
            "input": joined(),
            "output_split_sizes": [NUMEL] * mpisgd.size(),
            "input_split_sizes": [NUMEL] * mpisgd.size(),
        },
        {
            "output": fits_joined,
            "input": reads_joined,
            "output_split_sizes": splits,
            "input_split_sizes": splits,
        },
        {"output": "input", "input": "output"},
    ),
    "send": Call(
        mpisgd.send, lambda: {"tensor": ones(), "dst": (mpisgd.rank() + 1) % mpisgd.size()}, min_size=2
    ),
    "recv": Call(
        mpisgd.recv,
        lambda: {"tensor": ones(), "src": (mpisgd.rank() + 1) % mpisgd.size()},
        {"tensor": writable, "src": either(nothing, lambda value: USUAL["src"](value))},
        min_size=2,
    ),
    "isend": Call(mpisgd.isend, lambda: {"tensor": ones(), "dst": 0}),
    "irecv": Call(
        mpisgd.irecv,
        lambda: {"tensor": ones(), "src": 0},
        {"tensor": writable, "src": either(nothing, lambda value: USUAL["src"](value))},
    ),
    "broadcast_object": Call(mpisgd.broadcast_object, lambda: {"obj": 1, "src": 0}),
    "all_gather_object": Call(
        mpisgd.all_gather_object,
        lambda: {"object_list": [None] * mpisgd.size(), "obj": 1},
        {"object_list": lambda value: isinstance(value, list) and len(value) == mpisgd.size()},
    ),
    "gather_object": Call(
        mpisgd.gather_object,
        lambda: {"obj": 1, "object_gather_list": [None] * mpisgd.size(), "dst": own_rank()},
        {"object_gather_list": lambda value: isinstance(value, list) and len(value) == mpisgd.size()},
    ),
    "scatter_object": Call(
        mpisgd.scatter_object,
        lambda: {"objects": [1] * mpisgd.size(), "src": own_rank()},
        {"objects": lambda value: isinstance(value, (list, tuple)) and len(value) == mpisgd.size()},
    ),
    "barrier": Call(mpisgd.barrier, dict),
    "context_parallel": Call(
        context_parallel,
        lambda: {"mesh": world(), "buffers": [torch.ones(2 * mpisgd.size())], "buffer_seq_dims": [0]},
        {
            "mesh": lambda _: False,
            "buffers": lambda _: False,
            "buffer_seq_dims": lambda _: False,
            "no_restore_buffers": lambda value: value is None or repr(value) in ("[]", "()", "{}", "set()"),
        },
        {"buffers": "buffer", "buffer_seq_dims": "buffer"},
        together=("buffers", "buffer_seq_dims", "no_restore_buffers"),
    ),
    "close_group": Call(
        mpisgd.close_group,
        lambda: {"group": group_of_others()},
        {"group": lambda value: False},
    ),
    "new_group": Call(
        mpisgd.new_group,
        lambda: {"ranks": [0]},
        {
            "ranks": either(nothing, lambda value: False),
            "name": either(nothing, junk.text),
            "pg_options": nothing,
        },
        together=("pg_options",),
    ),
    "init": Call(
        mpisgd.init,
        dict,
        {
            "comm": nothing,
            "num_threads": either(nothing, positive_int),
            "gpu": nothing,
            "keep_memory": either(nothing, flag),
            "pg_options": nothing,
        },
    ),
    "broadcast_parameters": Call(
        mpisgd.broadcast_parameters,
        lambda: {"params": model()},
        {
            "params": lambda value: (
                isinstance(value, (torch.nn.Module, dict)) or repr(value) in ("[]", "set()")
            )
        },
    ),
    "average_parameters": Call(
        mpisgd.average_parameters,
        lambda: {"params": model()},
        {
            "params": lambda value: (
                isinstance(value, (torch.nn.Module, dict)) or repr(value) in ("[]", "set()")
            )
        },
    ),
    "broadcast_optimizer_state": Call(
        mpisgd.broadcast_optimizer_state, lambda: {"optimizer": optimizer()}, {"optimizer": lambda _: False}
    ),
    "average_gradients": Call(
        mpisgd.average_gradients,
        lambda: {"model": model()},
        {"model": lambda value: isinstance(value, torch.nn.Module)},
    ),
    "DistributedOptimizer": Call(
        mpisgd.DistributedOptimizer,
        lambda: {"optimizer": optimizer()},
        {
            "optimizer": lambda _: False,
            "named_parameters": nothing,
            "strategy": nothing,
            "compression": nothing,
            "backward_passes_per_step": positive_int,
            "reproducible": nothing,  # and "ranks", which is no junk
            "gradient_predivide_factor": lambda value: (
                isinstance(value, (int, float)) and 0 < value < math.inf
            ),
            "bucket_cap_bytes": positive_int,
            "overlap": either(nothing, flag),
            "error_if_nonfinite": flag,
            "check_in_sync_every": junk.natural,
            "share_parameters": flag,
            "elementwise": flag,
            "check_start": flag,
            "named_buffers": lambda value: value is None or repr(value) in ("[]", "()", "{}", "set()"),
        },
    ),
    "LocalSGD": Call(
        mpisgd.LocalSGD,
        lambda: {"sync_every": 4},
        {
            "sync_every": positive_int,
            "warmup_steps": junk.natural,
            "hierarchy": nothing,
            "average_state": flag,
            "growth": lambda value: isinstance(value, (int, float)) and 1 <= value < math.inf,
            "max_sync_every": either(nothing, positive_int),
        },
    ),
    "DiLoCo": Call(
        mpisgd.DiLoCo,
        lambda: {"sync_every": 10**9},
        {
            "sync_every": positive_int,
            "outer_optimizer": lambda value: value is torch.optim.SGD,
            "outer_options": either(nothing, lambda value: isinstance(value, dict) and not value),
            "fragments": positive_int,
            "overlap_steps": junk.natural,
            "overlap_alpha": lambda value: isinstance(value, (int, float)) and 0 <= value <= 1,
            "quorum": either(nothing, positive_int),
            "grace_s": nothing,  # it goes with quorum=
            "weights": nothing,
            "learners": lambda value: isinstance(value, str) and value == "rank",
        },
    ),
    "SparseLoCo": Call(
        mpisgd.SparseLoCo,
        lambda: {"keep": 1, "chunk": 2**16},
        {
            "sync_every": positive_int,
            "keep": lambda value: positive_int(value) and value <= 2**16,
            "chunk": lambda value: positive_int(value) and value <= 2**16,
            "bits": lambda value: positive_int(value) and 2 <= value <= 8,
            "error_decay": lambda value: (
                isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
            ),
            "lr": junk.positive,
        },
    ),
    "ElasticAveraging": Call(
        mpisgd.ElasticAveraging,
        dict,
        {"alpha": either(nothing, junk.positive), "every": positive_int},
    ),
    "Gossip": Call(
        mpisgd.Gossip,
        lambda: {"topology": "ring"},
        {
            "topology": lambda _: False,
            "style": lambda _: False,
            "every": positive_int,
            "consensus_step": either(nothing, lambda value: junk.positive(value) and value <= 1),
        },
    ),
    "check_in_sync": Call(
        mpisgd.check_in_sync,
        lambda: {"state": model()},
        {"state": either(module, lambda value: isinstance(value, dict) or repr(value) in ("[]", "set()"))},
    ),
    "SyncBatchNorm": Call(
        mpisgd.SyncBatchNorm,
        lambda: {"num_features": 3},
        {
            "num_features": lambda value: isinstance(value, int) and 0 <= value < 10**7,
            "eps": lambda value: isinstance(value, (int, float)) and value >= 0,
            "momentum": either(nothing, lambda value: isinstance(value, (int, float))),
            "affine": flag,
            "track_running_stats": flag,
            "process_group": either(nothing, lambda value: isinstance(value, junk.Hostile)),
            "device": junk.anything,  # torch's own
            "dtype": junk.anything,
            "bias": flag,
        },
    ),
    "start_timeline": Call(
        mpisgd.start_timeline, lambda: {"path": str(some_path())}, {"path": junk.text}, together=("path",)
    ),
    "partition": Call(
        mpisgd.data.partition,
        lambda: {"dataset": dataset(), "fractions": [0.5, 0.5]},
        {"dataset": has_length, "fractions": lambda value: repr(value) in ("[1]", "[1.0]", "[True]")},
        {"fractions": "fraction"},
    ),
    "scatter_dataset": Call(
        mpisgd.data.scatter_dataset,
        lambda: {"dataset": dataset()},
        {"dataset": has_length, "shuffle": flag},
        {"dataset": "data"},
        together=("dataset",),
    ),
    "save": Call(
        checkpoint.save,
        lambda: {"folder": nowhere(), "step": 1, "x": 1},
        {
            "folder": junk.text,
            "step": junk.natural,
            "keep_last": either(nothing, positive_int),
            "rng": flag,
            "mode": nothing,
        },
        said_as={NO_SUCH: nowhere()},  # the name of one more value: only the folder is wrong
    ),
    "load": Call(
        checkpoint.load,
        lambda: {"path": nowhere()},
        {"path": junk.text, "rng": flag, "scratch": either(nothing, junk.text)},
        said_as={NO_SUCH: nowhere()},  # the name of one more object
    ),
    "latest": Call(checkpoint.latest, lambda: {"folder": nowhere()}, {"folder": junk.text}),
    "Writer": Call(
        checkpoint.Writer,
        lambda: {"folder": nowhere()},
        {
            "folder": junk.text,
            "keep_last": either(nothing, positive_int),
            "when_busy": lambda _: False,
            "rng": flag,
            "mode": nothing,
        },
    ),
    "on_preemption": Call(
        checkpoint.on_preemption,
        lambda: {"signals": []},
        {"signals": lambda value: isinstance(value, (list, set)) and all(map(junk.integer, value))},
    ),
    "run": Call(
        elastic.run,
        lambda: {"func": lambda state: None},
        {
            "func": either(nothing, callable),
            "min_ranks": positive_int,
            "max_ranks": either(nothing, positive_int),
            "regrow": flag,
        },
    ),
    "ElasticSampler": Call(
        elastic.ElasticSampler,
        lambda: {"dataset": range(10)},
        {"dataset": lambda value: hasattr(type(value), "__len__"), "shuffle": flag},
    ),
    "PerRank": Call(
        elastic.PerRank,
        lambda: {"get": lambda: 1, "put": lambda pieces: None},
        {"get": callable, "put": callable},
    ),
    "ItemDataset": Call(mpisgd.data.ItemDataset, lambda: {"items": [1]}, {"items": has_length}),
}

# Nothing to be wrong about: no arguments, or no function.
WITHOUT_ARGUMENTS = {
    *(
        "is_initialized",
        "is_main",
        "local_rank",
        "local_size",
        "node_rank",
        "num_nodes",
        "rank",
        "shutdown",
        "size",
    ),
    "stop_timeline",
}
NOT_CALLED = {
    "average": "its arguments: tests/unit/optim",
    "join": "its arguments: tests/unit/optim/test_join.py",
    "Join": "made by join()",
    "print0": "prints whatever it is given",
    "seed": "its arguments: tests/unit/data",
    "Adasum": "a constant",
    "BucketLayout": "made by the plan of buckets",
    "MeshLayout": "made by layout",
    "NamedModel": "its arguments: tests/unit/plan",
    "Offload": "its arguments: tests/unit/sharding",
    "Dion": "its arguments: tests/unit/optim",
    "MuonWithAdamW": "its arguments: tests/unit/optim",
    "OneBitAdam": "its arguments: tests/mpi/optim",
    "Sharded": "its arguments: tests/mpi/optim",
    "Verification": "made by verify",
    "auto_layout": "its arguments: tests/mpi/layouts",
    "estimate_memory": "its arguments: tests/unit/optim",
    "layout": "its arguments: tests/mpi/layouts",
    "offload_parameters": "its arguments: tests/mpi/sharding",
    "verify": "its arguments: tests/mpi/verification",
    "OneBitLamb": "its arguments: tests/mpi/optim",
    "ZeroOneAdam": "its arguments: tests/mpi/optim",
    "BucketReducer": "a base class",
    "Compression": "a choice of constants",
    "Compressor": "a base class",
    "Group": "made by new_group",
    "ReduceOp": "a choice of constants",
    "Strategy": "a base class",
    "Synchronizer": "a base class",
    "Synchronous": "takes no arguments",
    "ParameterServer": "its arguments: tests/mpi/strategies",
    "Window": "its arguments: tests/mpi/rma",
    "Training": "made by DistributedOptimizer",
    "Work": "made by the operations",
    "Loaded": "made by load",
    "Preemption": "made by on_preemption",
    "State": "takes any values by name",
}
