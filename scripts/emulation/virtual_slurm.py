"""Run a command on an emulated Slurm cluster: the program behind `./scripts/slurm`.

The nodes are the emulated hosts of `virtual_cluster`. Each runs the distribution's slurmd with a network and
a host name of its own, so that slurmd needs no `--enable-multiple-slurmd`. The controller and the command run
on a host `login`, which is no node:

    stage ...........................................................
    :   login: munged, slurmctld,           node1: slurmd   job's   :
    :          COMMAND (sbatch, srun)       node2: slurmd   ranks   :
    :..............................................................:

As there, the kernel cleans up: all daemons and jobs end with the command.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import virtual_cluster
from virtual_cluster import STAGE, UNAVAILABLE, CannotRun, Host

# The last one since Slurm's plugin for PMIx opens libpmix.so by its name for developers.
PACKAGES = ("slurm-wlm", "munge", "libpmix-dev")
DAEMONS = ("munged", "slurmctld", "slurmd")
LOGIN, LOGIN_ADDRESS = "login", "10.0.0.254"
CONFIGURATION = STAGE / "slurm.conf"
HISTORY = STAGE / "jobs"  # a line for each end of a job, also for one that is queued again
START_LIMIT_S = 20.0

# Two partitions of the same nodes: a job in `high` preempts those in `low`, which have 20 seconds to save.
SETTINGS = f"""\
ClusterName=emulated
SlurmctldHost={LOGIN}({LOGIN_ADDRESS})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={STAGE}/state
SlurmctldPidFile={STAGE}/slurmctld.pid
SlurmctldLogFile={STAGE}/slurmctld.log
SlurmdSpoolDir={STAGE}/%n/spool
SlurmdPidFile={STAGE}/%n/slurmd.pid
SlurmdLogFile={STAGE}/%n/slurmd.log
TmpFS={STAGE}/%n/tmp
TaskProlog={STAGE}/task-prolog
JobCompType=jobcomp/filetxt
JobCompLoc={HISTORY}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=5
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
# /tmp is that of the machine, and nodes do not share theirs.
TASK_PROLOG = f"""\
#!/bin/sh
echo export TMPDIR={STAGE}/$SLURMD_NODENAME/tmp
"""


def configuration(hosts: Sequence[Host], extra: Sequence[str] = ()) -> str:
    """The slurm.conf of a cluster: a node has one CPU for each slot, whatever the machine has."""
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs={host.slots}" for host in hosts]
    return SETTINGS + "\n".join([*nodes, PARTITIONS.strip(), *extra]) + "\n"


def obstacle() -> str:
    """What stands in the way here, as a reason; empty if nothing."""
    if not all(shutil.which(daemon, path=virtual_cluster.search_path()) for daemon in DAEMONS):
        return f"missing: apt-get install {' '.join(PACKAGES)}"
    return virtual_cluster.obstacle()


# On the stage.


def add_login() -> None:
    """Make the stage itself the host on which people log in."""
    virtual_cluster.run("hostname", LOGIN)
    virtual_cluster.run("ip", "address", "add", f"{LOGIN_ADDRESS}/24", "dev", "bridge")
    with (STAGE / "hosts").open("a") as names:
        names.write(f"{LOGIN_ADDRESS} {LOGIN}\n")


def start_munge() -> None:
    """What lets Slurm's daemons and commands trust each other; one for all hosts, which share its socket."""
    Path("/run/munge").mkdir(mode=0o755)
    key = STAGE / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    files = [f"--{name}-file={STAGE}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    virtual_cluster.run("munged", "--force", *files)


def start_slurm(hosts: Sequence[Host], extra: Sequence[str]) -> None:
    """Start the controller and one daemon on each node; return when all of them take jobs."""
    CONFIGURATION.write_text(configuration(hosts, extra))
    os.environ["SLURM_CONF"] = str(CONFIGURATION)
    prolog = STAGE / "task-prolog"
    prolog.write_text(TASK_PROLOG)
    prolog.chmod(0o755)
    (STAGE / "state").mkdir()
    HISTORY.touch()
    virtual_cluster.run("slurmctld")
    for host in hosts:
        (host.folder / "spool").mkdir()
        virtual_cluster.run(host.folder / "enter", "slurmd", "-N", host.name)
    wait_until_idle(len(hosts))


def wait_until_idle(num_nodes: int) -> None:
    """Wait until that many nodes can be used; raise CannotRun with the controller's log after a while."""
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until:
        told = subprocess.run(["sinfo", "-hN", "-p", "low", "-o", "%T"], capture_output=True, text=True)
        if told.stdout.split() == ["idle"] * num_nodes:
            return
        time.sleep(0.1)
    raise CannotRun(f"the nodes did not come up: {told.stdout} {(STAGE / 'slurmctld.log').read_text()}")


def perform(options: argparse.Namespace) -> int:
    """Make the cluster and run the command on it; the exit code. When this returns, the stage is gone."""
    try:
        virtual_cluster.clear_stage()
        hosts = virtual_cluster.make_hosts(options.hosts, own_cores=False)
        virtual_cluster.build(hosts, "none")
        add_login()
        if options.check:
            return 0
        start_munge()
        start_slurm(hosts, options.setting)
    except CannotRun as reason:
        print(f"slurm: not possible here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    code = virtual_cluster.wait_for(subprocess.Popen(options.program).pid)
    if options.history:
        shutil.copyfile(HISTORY, options.history)
    return code


# Outside.


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; what follows the first `--` is the command."""
    parser = argparse.ArgumentParser(
        prog="scripts/slurm",
        usage="%(prog)s [--hosts 2,2] [option ...] -- PROGRAM [argument ...]",
        description="Run a command on an emulated Slurm cluster of this machine.",
    )
    parser.add_argument(
        "--setting", action="append", default=[], metavar="LINE", help="a further line of slurm.conf"
    )
    parser.add_argument("--history", metavar="FILE", help="write there how each job has ended")
    return virtual_cluster.parse_emulation(parser, arguments, "CPUs")


def main(arguments: Sequence[str]) -> int:
    """The exit code: the command's, or UNAVAILABLE with one line that says why."""
    options = parse(arguments)
    if options.on_stage:
        return perform(options)
    if reason := obstacle():
        print(f"slurm: not possible here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    return virtual_cluster.on_stage(arguments, options.time_limit, program=Path(__file__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
