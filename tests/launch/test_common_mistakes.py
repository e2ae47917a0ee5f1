"""docs/how-to/common-mistakes.md has the messages that appear today: each mistake is made, and compared."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from launcher import run_python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "common-mistakes.md"
FIRST = """import sys, time, torch, mpisgd
mpisgd.init()
rank = mpisgd.rank()
def net():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)
def wrap(model, **options):
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpisgd.DistributedOptimizer(plain, model.named_parameters(), **options)
"""
# By the beginning of the message on the page: the program, and how many ranks make the mistake.
MISTAKES = {
    "CollectiveMismatch: rank 0 calls all_reduce": ("if rank == 0: mpisgd.all_reduce(torch.ones(1))", 3),
    "CollectiveMismatch: rank 0 has ended its program": (
        """
        model = net()
        optimizer = wrap(model)
        for _ in range(2 if rank == 0 else 3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        """,
        3,
    ),
    "CollectiveMismatch: shape of all_gather differs": (
        """
        x = torch.ones(5 if rank == 0 else 8)
        mpisgd.all_gather([torch.empty_like(x) for _ in range(3)], x)
        """,
        3,
    ),
    "CollectiveMismatch: the ranks start from different parameters": (
        """
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 2)
        optimizer = wrap(model)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        """,
        3,
    ),
    "CollectiveMismatch: DistributedOptimizer: the parameters differ": (
        "wrap(torch.nn.Linear(4, 2, bias=rank != 2))",
        3,
    ),
    "Deadlock: ranks 0, 1, 2 can never go on": (
        """
        mpisgd.recv(torch.ones(3), (rank + 1) % 3)
        mpisgd.send(torch.ones(3), (rank - 1) % 3)
        """,
        3,
    ),
    "CollectiveTimeout: rank 0 has waited": (
        """
        if rank == 1:
            time.sleep(30)
        mpisgd.barrier()
        """,
        2,
    ),
    "CollectiveMismatch: rank 1 left the program": (
        """
        optimizer = wrap(model := net())
        if rank == 1:
            sys.exit(3)
        model(torch.ones(3, 4)).sum().backward()
        """,
        3,
    ),
    "mpisgd: warning: 3 steps were taken": (
        """
        model = net()
        mpisgd.broadcast_parameters(model)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        """,
        2,
    ),
    "RuntimeWarning: DistributedOptimizer: none of its parameters": (
        """
        optimizer = wrap(net())
        model = net()
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        """,
        2,
    ),
    "RuntimeWarning: DistributedOptimizer: the ranks have different": (
        """
        optimizer = wrap(model := net())
        for _ in range(101):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            model.weight.grad += rank
            model.bias.grad += rank
            optimizer.step()
        """,
        2,
    ),
    "AttributeError: 'NoneType' object": ("mpisgd.all_reduce(torch.ones(1)).item()", 1),
    "DistributedOptimizer: this optimizer is distributed": (
        "wrap(model := net()); mpisgd.DistributedOptimizer(wrap(model))",
        1,
    ),
    "DistributedOptimizer: group 0, parameter 0": (
        "mpisgd.DistributedOptimizer(torch.optim.SGD(net().parameters()), net().named_parameters())",
        1,
    ),
    "all_reduce: tensor is a float": ("mpisgd.all_reduce(3.0)", 1),
    "DistributedOptimizer() got an unexpected keyword": ("wrap(net(), compress=None)", 1),
    "gradients that were summed already": (
        """
        model = net()
        optimizer = wrap(model, op="sum")
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
        """,
        2,
    ),
    "the gradient of weight is divided": (
        """
        model = net()
        optimizer = wrap(model, strategy=mpisgd.Sharded(stage=2))
        model(torch.ones(3, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        2,
    ),
    "gradients are infinite or NaN": (
        """
        model = net()
        optimizer = wrap(model, error_if_nonfinite=True)
        (model(torch.ones(3, 4)).sum() / 0).backward()
        """,
        2,
    ),
    "recv: the message from rank 0 has": (
        "mpisgd.send(torch.ones(3), 1) if rank == 0 else mpisgd.recv(torch.ones(5), 0)",
        2,
    ),
    "this process was forked from rank 0": (
        """
        class Communicates(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i):
                mpisgd.barrier()
                return i
        list(torch.utils.data.DataLoader(Communicates(), num_workers=1, multiprocessing_context="fork"))
        """,
        1,
    ),
}
# How a job is started wrongly: variables of the environment, without a launcher.
STARTS = {
    "RANK=0 and WORLD_SIZE=2 are set": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "2 ranks were started, but": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "no MPI library could be loaded": {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
}
ELSEWHERE = ("Open MPI does not start as root",)  # tests/unit/cli/test_run_as_root.py
SHORT = ("CollectiveMismatch: rank 0 calls all_reduce", "recv: the message from rank 0 has")


def messages() -> list[str]:
    """The messages of the page: its blocks of text, and the second column of its tables of mistakes."""
    text = PAGE.read_text()
    blocks = [
        block
        for block in re.findall(r"^```text\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)
        if not block.startswith("MPI_ABORT")
    ]
    tables = re.findall(r"^\| mistake \|.*?\n\|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [row.split(" | ")[1] for table in tables for row in table.splitlines()]
    quoted = [re.match(r"`([^`]*)`", cell) for cell in cells]
    return [*blocks, *(each[1] for each in quoted if each)]


def pattern(message: str) -> str:
    """The pattern of a message: `...` stands for anything; times and places differ."""
    parts = [re.escape(part.strip()) for part in message.split("...")]
    text = r".*".join(part.replace(r"\ ", r"\s+") for part in parts)
    text = re.sub(r"train\\\.py:\d+", r"\\S+\\.py:\\d+", text)
    return re.sub(r"1800\\\.0", r"[\\d.]+", text)


def params(names) -> list:
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in names]


def the_message(beginning: str) -> str:
    found = [each for each in messages() if each.startswith(beginning)]
    assert len(found) == 1, f"{beginning!r} is not on the page once"
    return found[0]


def test_each_message_of_the_page_is_made_here():
    known = (*MISTAKES, *STARTS, *ELSEWHERE)
    assert [each for each in messages() if not each.startswith(known)] == []
    assert len(known) >= 12
    assert all(the_message(beginning) for beginning in known)


@pytest.mark.parametrize("beginning", params(MISTAKES))
def test_a_mistake_has_its_message(beginning, tmp_path):
    text, num_ranks = MISTAKES[beginning]
    program = tmp_path / "train.py"
    program.write_text(FIRST + textwrap.dedent(text))
    limit_s = "3" if beginning.startswith("CollectiveTimeout") else "30"
    done = run_python(str(program), num_ranks=num_ranks, env={"MPISGD_TIMEOUT_S": limit_s})
    assert (done.returncode == 0) == ("warning" in beginning.lower()), done.stderr
    assert re.search(pattern(the_message(beginning)), done.stderr, re.DOTALL), done.stderr


@pytest.mark.parametrize("beginning", params(STARTS))
def test_a_wrong_start_has_its_message(beginning, tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import mpisgd\nmpisgd.init()\n")
    done = run_python(str(program), env=STARTS[beginning], fresh=True)
    assert done.returncode != 0
    assert done.stderr.count("  File ") == 1, done.stderr  # the program's own line
    assert re.search(pattern(the_message(beginning)), done.stderr, re.DOTALL), done.stderr
