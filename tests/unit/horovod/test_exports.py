"""Everything that scripts import from Horovod's torch modules is there, with the arguments they give."""

from __future__ import annotations

import importlib
import inspect

import pytest

import mpisgd.horovod as hvd
from mpisgd.horovod.elastic import common, state
from mpisgd.horovod.shim.finder import ALIASES

EXPORTS = """
elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_
grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
join barrier poll synchronize init shutdown is_initialized start_timeline stop_timeline
size local_size cross_size rank local_rank cross_rank mpi_threads_supported
mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
HorovodInternalError DistributedOptimizer SyncBatchNorm
"""

FUNCTIONS = """
HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast
HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter
"""

# What scripts import from elsewhere than horovod.torch itself.
ELSEWHERE = {
    "horovod.common.elastic": ["ObjectState", "State", "run_fn"],
    "horovod.common.exceptions": [
        "HorovodInternalError",
        "HorovodVersionMismatchError",
        "HostsUpdatedInterrupt",
    ],
    "horovod.common.process_sets": [
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    ],
    "horovod.torch.compression": ["Compression"],
    "horovod.torch.elastic": ["ElasticSampler", "TorchState", "run"],
    "horovod.torch.elastic.sampler": ["ElasticSampler"],
    "horovod.torch.elastic.state": [
        "ModelStateHandler",
        "OptimizerStateHandler",
        "SamplerStateHandler",
        "StateHandler",
        "TorchState",
        "get_handler_registry",
        "set_handler_registry",
    ],
    "horovod.torch.functions": [
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ],
    "horovod.torch.mpi_ops": [*FUNCTIONS.split(), "is_homogeneous", "allreduce_async_", "synchronize", "Sum"],
    "horovod.torch.optimizer": ["DistributedOptimizer"],
    "horovod.torch.sync_batch_norm": ["SyncBatchNorm"],
}

SIGNATURES = {
    hvd.start_timeline: "file_path, mark_cycles=False",
    hvd.stop_timeline: "",
    hvd.SyncBatchNorm: "num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True",
    hvd.elastic.run: "func=None",  # with options it is called without
    hvd.elastic.TorchState: "model=None, optimizer=None",
    hvd.elastic.ElasticSampler: "dataset, shuffle=True, seed=0",
    hvd.elastic.ElasticSampler.set_epoch: "self, epoch",
    hvd.elastic.ElasticSampler.record_batch: "self, batch_idx, batch_size",
    hvd.elastic.ElasticSampler.load_state_dict: "self, state_dict",
    common.State: "bcast_object, get_rank",
    common.ObjectState: "bcast_object, get_rank",
    common.State.on_hosts_updated: "self, timestamp, update_res",
    common.State.register_reset_callbacks: "self, callbacks",
    common.run_fn: "func, reset",
    state.StateHandler: "value",
    state.StateHandler.set_value: "self, value",
    state.set_handler_registry: "registry",
    hvd.DistributedOptimizer: "optimizer, named_parameters=None, compression=hvd.Compression.none, "
    "backward_passes_per_step=1, op=hvd.Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
    "sparse_as_dense=False, process_set=hvd.global_process_set",
}


def by_position(function: object) -> list[tuple[str, object]]:
    return [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize("name", EXPORTS.split())
def test_horovods_names_are_exported(name):
    assert name in hvd.__all__
    assert getattr(hvd, name) is not None


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_arguments_begin_as_horovods(function):
    wanted = by_position(eval(f"lambda {SIGNATURES[function]}: None", {"hvd": hvd}))
    given = by_position(function)
    assert given[: len(wanted)] == wanted
    assert all(default is not inspect.Parameter.empty for _, default in given[len(wanted) :])


@pytest.mark.parametrize("module", ELSEWHERE)
def test_modules_have_what_scripts_take_from_them(module):
    ours = importlib.import_module(ALIASES[module])
    assert [name for name in ELSEWHERE[module] if not hasattr(ours, name)] == []


def test_every_name_of_an_operation_means_the_same():
    shared = set(vars(hvd.mpi_ops)) & set(hvd.__all__)
    assert {"allreduce", "init", "Sum", "global_process_set"} <= shared
    assert all(getattr(hvd.mpi_ops, name) is getattr(hvd, name) for name in shared)


def test_no_other_names_are_made_up():
    with pytest.raises(AttributeError, match="no attribute 'allredcue'"):
        hvd.allredcue  # noqa: B018
