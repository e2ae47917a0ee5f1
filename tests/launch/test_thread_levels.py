"""An MPI that runs at a lower thread level: what may not be called is refused, what may be is right."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from launcher import run_python
from simulated_gpu.guard import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="a simulated GPU needs a C++ compiler")

# torch computes the backward of what lies on a GPU in a thread of its own.
START = """
import sys, threading
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
sys.path.insert(0, {tests!r})
import torch, mpisgd
from mpisgd.accelerator.runtime import set_runtime
from simulated_gpu.runtime import SimulatedGpu
set_runtime(SimulatedGpu())
from mpi4py import MPI
mpisgd.init(gpu="mpi", timeout_s=30)
levels = dict(single=MPI.THREAD_SINGLE, funneled=MPI.THREAD_FUNNELED, serialized=MPI.THREAD_SERIALIZED)
assert MPI.Query_thread() == levels[sys.argv[1]], MPI.Query_thread()
model = torch.nn.Linear(3, 2, bias=False).to("simgpu")
torch.nn.init.ones_(model.weight)
optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
def loss(): return model(torch.full((1, 3), mpisgd.rank() + 1.0, device="simgpu")).sum()
"""


@pytest.fixture
def program(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "prog.py"
        path.write_text(START.format(tests=str(Path(__file__).parents[1])) + textwrap.dedent(text))
        return str(path)

    return write


def test_where_one_thread_at_a_time_may_call_backward_reduces_and_two_at_once_are_told(program):
    """With all messages by MPI, as between hosts: a checkpoint's thread beside training hung there."""
    done = run_python(
        program("""
            loss().backward()
            assert (model.weight.grad == 1.5).all()
            print("reduced", flush=True)
            groups = [mpisgd.new_group([0, 1]) for _ in range(2)]
            def sum_in(group):
                for _ in range(3000):
                    mpisgd.all_reduce(torch.ones(300), group=group)
            saving = threading.Thread(target=sum_in, args=(groups[1],))
            saving.start()
            sum_in(groups[0])
            saving.join()
            raise SystemExit(3)
        """),
        "serialized",
        num_ranks=2,
        env={"MPISGD_SHARED_MEMORY": "0"},
    )
    assert done.stdout.split() == ["reduced"] * 2
    assert "one thread at a time may call it" in done.stderr, done.stderr
    assert done.returncode
    assert "has waited" not in done.stderr


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_where_one_thread_alone_may_call_backward_on_a_gpu_is_told_and_the_step_reduces(program, level):
    done = run_python(
        program("""
            def message(call):
                try:
                    call()
                except mpisgd.MpiFailed as exc:
                    return str(exc)
            text = message(lambda: loss().backward())
            assert "only the thread that has started MPI may call it" in text and "no_sync" in text, text
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss().backward()
            optimizer.step()
            assert (model.weight.detach() == 1 - 1.5).all(), model.weight
            seen, sent = [], torch.ones(1)
            for call in (mpisgd.barrier, lambda: mpisgd.isend(sent, 0), lambda: mpisgd.irecv(sent, 0)):
                thread = threading.Thread(target=lambda: seen.append(message(call)))
                thread.start()
                thread.join()
            assert all("only the thread" in text for text in seen), seen
            mpisgd.barrier()
        """),
        level,
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
