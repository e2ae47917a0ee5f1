"""A host is cut off in the middle of a training: the greater part goes on, and the job ends."""

from __future__ import annotations

import re

import pytest
from clusters import run_code

TRAINING = """
    import os, socket, subprocess, sys, time
    import torch
    import mpisgd
    from mpisgd import elastic
    mpisgd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(60, 8, dtype=torch.float64)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    piece = torch.tensor([10.0 * mpisgd.rank()])
    pieces = {}
    state = elastic.State(model=model, optimizer=optimizer, step=0,
                          own=elastic.PerRank(lambda: piece, lambda all_of_them: pieces.update(all_of_them)))
    cuts = socket.gethostname() == "CUT" and mpisgd.local_rank() == 0

    def loss_of(rank, size):
        return model(inputs[rank::size]).square().mean()

    @elastic.run
    def train(state):
        while state.step < 20:
            if cuts and state.step == 7:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            optimizer.zero_grad()
            loss_of(mpisgd.rank(), mpisgd.size()).backward()
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    def alone(schedule):
        model.load_state_dict(start)
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        for size in schedule:
            plain.zero_grad()
            (sum(loss_of(rank, size) for rank in range(size)) / size).backward()
            plain.step()

    started = mpisgd.size()
    train(state)
    trained = [p.detach().clone() for p in model.parameters()]
    alone([started] * 5 + [mpisgd.size()] * 15)
    worst = max((a - b).abs().max().item() for a, b in zip(trained, model.parameters()))
    own = {rank: value.item() for rank, value in sorted(pieces.items())}
    print(f"rank {mpisgd.rank()} of {mpisgd.size()}: off by {worst:.1e}, pieces {own}", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "cut", "left"),
    [("1,2,1", "node3", 3), ("2,2", "node2", 2)],
)
def test_the_greater_part_of_a_cut_network_goes_on(hosts, cut, left):
    options = "--with-ft ulfm --prtemca oob_tcp_keepalive_time 0"
    done = run_code(hosts, TRAINING.replace("CUT", cut), options=options)
    said = re.findall(r"rank (\d) of (\d): off by (\S+), pieces (.*)", done.stdout)
    assert sorted(rank for rank, *_ in said) == [str(rank) for rank in range(left)], done.stderr
    assert {size for _, size, *_ in said} == {str(left)}
    assert all(float(worst) < 1e-12 for _, _, worst, _ in said)
    assert {pieces for *_, pieces in said} == {"{0: 0.0, 1: 10.0, 2: 20.0, 3: 30.0}"}
    assert "mpirun would wait for the lost host" in done.stderr


SERVER = """
    import os, signal
    import torch
    import mpisgd
    mpisgd.init()
    model = torch.nn.Linear(300, 300)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), strategy=mpisgd.ParameterServer("async")
    )
    try:
        for step in range(1000):
            if mpisgd.rank() == 2 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
        optimizer.synchronizer.finish()
        print("came to its end", flush=True)
    except mpisgd.PeerLost as exc:
        print("PeerLost:", exc, flush=True)
        os._exit(3)
"""


@pytest.mark.long
def test_a_lost_rank_ends_the_others_of_a_parameter_server_in_time():
    """Open MPI goes on waiting for it in one-sided calls; the limit of a call inside MPI is half an hour."""
    done = run_code("1,1,1", SERVER, options="--with-ft ulfm")
    assert "came to its end" not in done.stdout
    assert "PeerLost:" in done.stdout or "does not end a one-sided call" in done.stderr, done.stderr
