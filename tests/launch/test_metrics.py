"""Metrics as a user asks for them, by `python -m mpisgd run`; and that there is nothing of them otherwise."""

from __future__ import annotations

import re
import socket

from launcher import run_python

PROGRAM = """
import os, sys, threading, urllib.request
import torch
import mpisgd, mpisgd.tracing
mpisgd.init()
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(20):
    optimizer.step()
    mpisgd.all_reduce(torch.ones(3))
if mpisgd.rank() == 0:
    if port := os.environ.get("MPISGD_METRICS_PORT"):
        print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode())
        listener = mpisgd.metrics.session._session.server._listener.socket
        if (child := os.fork()) == 0:  # a worker of a DataLoader
            os._exit(10 * (listener.fileno() == -1 and mpisgd.tracing.sink is None))
        print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    threads = [thread.name for thread in threading.enumerate() if "metrics" in thread.name]
    modules = [name for name in sys.modules if name.startswith(("mpisgd.metrics", "prometheus"))]
    print("left:", mpisgd.tracing.sink is None, threads, modules)
mpisgd.barrier()
"""


def run(tmp_path, *options: str):
    (tmp_path / "prog.py").write_text(PROGRAM)
    return run_python("-m", "mpisgd", "run", "-n", "2", *options, str(tmp_path / "prog.py"))


def test_nothing_is_loaded_started_or_measured_where_nobody_asks(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "left: True [] []\n"


def test_a_port_of_the_host_shows_both_ranks(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = run(tmp_path, "--metrics-port", port)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"mpisgd: metrics of host \S+: http://127.0.0.1:{port}/metrics\n", done.stderr)
    steps = re.findall(r'^mpisgd_step\{host="[^"]+",rank="(\d)"\} (\S+)$', done.stdout, re.MULTILINE)
    assert steps == [("0", "20.0"), ("1", "20.0")]
    assert "left: False" in done.stdout
    assert "child: 10\n" in done.stdout, "it has neither the port nor what is measured"


def test_a_port_in_use_is_an_error_of_init(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_python(str(tmp_path / "prog.py"), env={"MPISGD_METRICS_PORT": port})
    assert done.returncode == 1
    assert f"port {port}: Address already in use" in done.stderr


AGAIN = """
import torch
import mpisgd, mpisgd.tracing
mpisgd.metrics.start()
mpisgd.shutdown()
assert mpisgd.tracing.sink is None
try:
    mpisgd.metrics.read()
except mpisgd.InvalidArgument as error:
    assert "nothing is measured" in str(error)
mpisgd.metrics.start()  # calls init()
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(3):
    optimizer.step()
    mpisgd.barrier()
print("steps:", mpisgd.metrics.read([mpisgd.rank()])[f"steps_total/rank{mpisgd.rank()}"])
"""


def test_they_end_with_the_job_and_begin_with_the_next(tmp_path):
    (tmp_path / "prog.py").write_text(AGAIN)
    done = run_python(str(tmp_path / "prog.py"), num_ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "steps: 2.0\n" * 2  # the third one has not ended
