"""Which transport device tensors take: from what the ranks have, without any of it."""

from __future__ import annotations

import pytest

from mpisgd.errors import InvalidArgument
from mpisgd.transport.device.selection import AWARE, NCCL, STAGING, DeviceFacts, agree_on_wanted, choose


def facts(gpus: str, *, nccl: bool = True, aware: bool = False) -> list[DeviceFacts]:
    """One rank per word `host:gpu`; hosts are numbered by their names."""
    places = [word.split(":") for word in gpus.split()]
    hosts = sorted({host for host, _ in places})
    return [DeviceFacts(host, hosts.index(host), gpu, nccl, aware) for host, gpu in places]


@pytest.mark.parametrize("gpus", ["a:0", "a:0 a:1", "a:0 b:0", "a:0 a:1 b:1 b:0"])
@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_a_gpu_of_its_own_for_every_rank_means_nccl(wanted, gpus):
    here = facts(gpus)
    assert choose(wanted, here, range(len(here))) == (NCCL, "")


@pytest.mark.parametrize(
    ("here", "why"),
    [
        (facts("a:0 a:1 b:x b:x"), "ranks 2, 3 share one GPU of host b (x), where NCCL needs one for each"),
        (facts("a:0 a:1", nccl=False), "the torch of ranks 0, 1 has no NCCL"),
        ([*facts("a:0"), facts("a:1", nccl=False)[0]], "the torch of rank 1 has no NCCL"),
        ([*facts("a:0"), DeviceFacts("a", 0, "", True, False)], "no GPU for rank 1"),
    ],
)
def test_otherwise_the_reason_is_told(here, why):
    assert choose("auto", here, range(len(here))) == (STAGING, why)
    with pytest.raises(InvalidArgument) as caught:
        choose("nccl", here, range(len(here)))
    assert f"{caught.value}" == f"gpu='nccl' cannot be: {why}"
    assert caught.value.on_every_rank


def test_ranks_are_called_by_their_names_in_the_job():
    assert "ranks 5, 9 share" in choose("auto", facts("a:0 a:0"), [5, 9]).reason


def test_mpi_is_taken_as_it_is():
    assert choose("mpi", facts("a:0 a:0", aware=True), [0, 1]) == (AWARE, "")
    assert choose("mpi", facts("a:0 a:1"), [0, 1]) == (STAGING, "")
    one_is_not = [*facts("a:0", aware=True), *facts("a:1")]
    assert choose("mpi", one_is_not, [0, 1]) == (STAGING, "")


def test_hosts_of_one_name_are_told_apart():
    assert choose("auto", [DeviceFacts("node", n, "0", True, False) for n in range(2)], [0, 1]).name == NCCL


def test_all_ranks_want_the_same():
    assert agree_on_wanted(["mpi", "mpi"]) == "mpi"
    with pytest.raises(InvalidArgument) as caught:
        agree_on_wanted(["auto", "nccl", "auto"])
    assert "ranks 0, 2 gpu='auto', rank 1 gpu='nccl'" in str(caught.value)
    assert caught.value.on_every_rank
