"""Names and signatures as scripts written for Horovod use them: by position as well as by name."""

from __future__ import annotations

import inspect

import pytest

import mpisgd.horovod as hvd

SET = "process_set=hvd.global_process_set"
REDUCTION = f"average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, {SET}"
COMPRESSED = (
    "average=None, name=None, compression=hvd.Compression.none, op=None, prescale_factor=1.0, "
    f"postscale_factor=1.0, {SET}"
)
SCATTERED = f"name=None, op=hvd.Average, {SET}, prescale_factor=1.0, postscale_factor=1.0"
SCATTERED_COMPRESSED = (
    f"name=None, compression=hvd.Compression.none, op=hvd.Average, {SET}, prescale_factor=1.0, "
    "postscale_factor=1.0"
)
OPTIMIZER = (
    "optimizer, named_parameters=None, compression=hvd.Compression.none, backward_passes_per_step=1, "
    "op=hvd.Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False"
)

SIGNATURES = {
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_async": f"tensor, {REDUCTION}",
    "allreduce_": f"tensor, {REDUCTION}",
    "allreduce_async_": f"tensor, {REDUCTION}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {REDUCTION}",
    "grouped_allreduce_": f"tensors, {REDUCTION}",
    "grouped_allreduce_async_": f"tensors, {REDUCTION}",
    "sparse_allreduce_async": f"tensor, name, op, {SET}",
    "allgather": f"tensor, name=None, {SET}",
    "allgather_async": f"tensor, name=None, {SET}",
    "grouped_allgather": f"tensors, name=None, {SET}",
    "grouped_allgather_async": f"tensors, name=None, {SET}",
    "broadcast": f"tensor, root_rank, name=None, {SET}",
    "broadcast_async": f"tensor, root_rank, name=None, {SET}",
    "broadcast_": f"tensor, root_rank, name=None, {SET}",
    "broadcast_async_": f"tensor, root_rank, name=None, {SET}",
    "alltoall": f"tensor, splits=None, name=None, {SET}",
    "alltoall_async": f"tensor, splits=None, name=None, {SET}",
    "reducescatter": f"tensor, {SCATTERED_COMPRESSED}",
    "reducescatter_async": f"tensor, {SCATTERED}",
    "grouped_reducescatter": f"tensors, {SCATTERED_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {SCATTERED}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": SET,
    "init": "comm=None, process_sets=None",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {SET}",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": f"{OPTIMIZER}, {SET}",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
}
WITHOUT_ARGUMENTS = [
    "shutdown",
    "is_initialized",
    "size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
]


def in_words(function) -> list[tuple[str, object]]:
    """The arguments that can be given by position, with their defaults."""
    return [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_begin_as_in_horovod(name):
    """What is ours may follow, with a default."""
    wanted = in_words(eval(f"lambda {SIGNATURES[name]}: None", {"hvd": hvd}))
    given = in_words(getattr(hvd, name))
    assert given[: len(wanted)] == wanted
    assert all(default is not inspect.Parameter.empty for _, default in given[len(wanted) :])


@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_queries_take_no_arguments(name):
    assert in_words(getattr(hvd, name)) == []


def test_reductions_have_horovods_numbers():
    named = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert named == (0, 1, 2, 3, 4, 5)


def test_all_names_what_is_there_sorted_and_explained():
    assert list(hvd.__all__) == sorted(set(hvd.__all__))
    for name in {*hvd.__all__, *SIGNATURES, *WITHOUT_ARGUMENTS}:
        assert name in hvd.__all__
        if callable(value := getattr(hvd, name)):
            assert inspect.getdoc(value), f"{name} has no docstring"


def test_exceptions_are_what_scripts_catch():
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.HorovodVersionMismatchError, ImportError)
    assert hvd.HostsUpdatedInterrupt(True).skip_sync is True


@pytest.mark.parametrize(
    "call",
    [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.mpi_threads_supported,
        hvd.join,
        hvd.barrier,
        hvd.global_process_set.size,
    ],
)
def test_what_needs_init_says_so(call):
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
        call()


def test_what_was_built_needs_no_init():
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not any([hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built()])
    assert isinstance(hvd.nccl_built(), int)
    assert not hvd.is_initialized()
    hvd.shutdown()
