"""The kinds of faults: how a run is started, which faults are injected, and what must result."""

import random
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from fault_injector import MOMENTS, Fault, draw, write
from fault_jobs import Ended, mpirun, on_hosts, program, run_job
from fault_program import losses_without_faults
from fault_verdict import Verdict, judge, read_events

RANKS = 4
STEPS = 40
EVERY = 5
IN_MEMORY = tuple(moment for moment in MOMENTS if moment != "checkpoint")
IN_A_STEP = tuple(moment for moment in IN_MEMORY if moment != "commit")
SURVIVING = ("--with-ft", "ulfm")
QUIET_S = 120.0
REPLACED_S = 40.0  # more for each rank that is replaced: Python, torch and MPI start, among much else
KILLED = 137  # mpirun's, although the program has ended well: it waits for no host, and counts a spawned rank
END_S = 30.0  # within which a job that cannot go on must have ended; most of it is its start


@dataclass(frozen=True)
class Round:
    """One run with faults.

    Attributes:
        rng: chooses the faults.
        folder: of this run.
        in_a_row: number of faults, for kinds with several.
    """

    rng: random.Random
    folder: Path
    in_a_row: int = 1


@dataclass
class Outcome:
    """The result of a round.

    Attributes:
        kind: of the faults.
        faults: number of injected faults.
        wrong: broken promises; empty if there are none.
        steps_lost: of each fault.
        recovery_s: of each fault, until the next step, or until the end of the job if that is the promise.
        seconds: of the whole run.
        what: the faults, to reproduce them.
        said: the output of the run.
    """

    kind: str
    faults: int = 1
    wrong: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    what: str = ""
    said: str = ""


@lru_cache
def expected(steps: int) -> list[float]:
    """The losses of a run without faults."""
    return losses_without_faults(steps)


def survived(
    kind: str,
    turn: Round,
    faults: Sequence[Fault],
    command: Sequence[str],
    *,
    steps: int = STEPS,
    codes: Sequence[int] = (0,),
    quiet_s: float = QUIET_S,
) -> Outcome:
    """Inject faults into a run that must finish with the losses of one without faults.

    Args:
        kind: of the faults.
        turn: the folder and the random number generator.
        faults: to inject.
        command: of the run.
        steps: number of steps of the run.
        codes: exit codes of success; mpirun has others when ranks are lost.
        quiet_s: silence after which the run is taken to hang; see `run_job`.
    """
    write(turn.folder / "plan.json", faults)
    ended = run_job(command, quiet_s)
    verdict = judge(read_events(turn.folder), expected(steps))
    wrong = [*verdict.wrong[:5], *_not_to_the_end(verdict, len(faults))]
    if ended.code not in codes:
        wrong.append(f"exit code {ended.code}: {_end_of(ended)}")
    return Outcome(
        kind,
        verdict.faults,
        wrong,
        verdict.steps_lost,
        verdict.recovery_s,
        ended.seconds,
        _told(faults),
        ended.output,
    )


def _not_to_the_end(verdict: Verdict, faults: int) -> list[str]:
    wrong = []
    if not verdict.finished:
        wrong.append("the last step was not done")
    elif verdict.ended != verdict.sizes[-1]:
        wrong.append(f"{verdict.ended} ranks came to the end, of {verdict.sizes[-1]}")
    if verdict.faults != faults:
        wrong.append(f"{verdict.faults} of {faults} faults were done")
    return wrong


def ended_well(kind: str, turn: Round, fault: Fault, command: Sequence[str], says: Sequence[str]) -> Outcome:
    """Inject a fault into a run that must end soon after with one of the messages `says`."""
    write(turn.folder / "plan.json", [fault])
    ended = run_job(command, QUIET_S, env={"MPISGD_TIMEOUT_S": "4"})
    events = read_events(turn.folder)
    struck = [event["t"] for event in events if event["event"] == "fault"]
    outcome = Outcome(kind, len(struck), seconds=ended.seconds, what=_told([fault]), said=ended.output)
    if not struck:
        outcome.wrong.append(f"the fault was not done: {_end_of(ended)}")
    elif ended.code is None:
        outcome.wrong.append("no end")
    elif ended.code == 0:
        outcome.wrong.append("exit code 0")
    if not any(word in ended.output for word in says):
        outcome.wrong.append(f"none of {list(says)} was said: {_end_of(ended)}")
    if ended.left:
        outcome.wrong.append(f"processes that outlive their job: {ended.left}")
    outcome.recovery_s = [ended.at - time for time in struck]
    return outcome


def _end_of(ended: Ended) -> str:
    return " | ".join(line for line in ended.output.splitlines() if line.strip())[-400:]


def _told(faults: Sequence[Fault]) -> str:
    return "; ".join(
        f"rank {fault.rank}, {fault.moment} of step {fault.step} + {fault.delay_s * 1e3:.1f} ms"
        for fault in faults
    )


def _elastic(folder: Path, *options: str) -> list[str]:
    return [*mpirun(RANKS, *SURVIVING), *program(str(folder), "--elastic", f"--steps={STEPS}", *options)]


def _one(kind: str, turn: Round, **options: object) -> Fault:
    choices = {"ranks": range(RANKS), "steps": range(EVERY + 1, STEPS - 2), "moments": IN_MEMORY}
    return draw(kind, turn.rng, every=EVERY, **{**choices, **options})  # type: ignore[arg-type]


# -- the kinds ---------------------------------------------------------------------------------------------


def kill(turn: Round) -> Outcome:
    """Kill -9 of a rank: the others continue."""
    return survived("kill", turn, [_one("kill", turn)], _elastic(turn.folder))


def kill_in_a_row(turn: Round) -> Outcome:
    """Kill -9 of one rank after the other in one run, each replaced."""
    apart = 2 * EVERY
    steps = apart * (turn.in_a_row + 1)
    faults = [
        _one("kill", turn, steps=range(apart * i + 1, apart * i + apart - 1), moments=IN_MEMORY)
        for i in range(1, turn.in_a_row + 1)
    ]
    command = _elastic(turn.folder, "--regrow", f"--steps={steps}")
    quiet_s = QUIET_S + REPLACED_S * turn.in_a_row
    return survived("kill-in-a-row", turn, faults, command, steps=steps, codes=(0, KILLED), quiet_s=quiet_s)


def kill_plain(turn: Round) -> Outcome:
    """Kill -9 of a rank without fault tolerance: the job ends."""
    command = [*mpirun(RANKS), *program(str(turn.folder), f"--steps={STEPS}")]
    return ended_well("kill-plain", turn, _one("kill", turn, moments=IN_A_STEP), command, ["signal 9"])


def kill_and_restart(turn: Round) -> Outcome:
    """Kill -9 of a rank without fault tolerance: the job restarts from the last checkpoint."""
    run = _mpisgd_run("-n", str(RANKS), "--restarts", "2", "--pause", "0")
    command = [*run, *program(str(turn.folder), "--checkpoints", f"--steps={STEPS}")[1:]]
    moments = (*IN_A_STEP, "checkpoint", "checkpoint")
    return survived("kill-and-restart", turn, [_one("kill", turn, moments=moments)], command)


def stop(turn: Round) -> Outcome:
    """SIGSTOP, and SIGCONT some time later: only time is lost."""
    fault = _one("stop", turn, lasts_s=turn.rng.uniform(0.1, 2.0))
    return survived("stop", turn, [fault], _elastic(turn.folder))


def stop_for_ever(turn: Round) -> Outcome:
    """SIGSTOP for ever: the others report the missing rank, and the job ends with the stopped one."""
    command = [*mpirun(RANKS), *program(str(turn.folder), f"--steps={STEPS}")]
    fault = _one("stop", turn, moments=IN_A_STEP)
    return ended_well("stop-for-ever", turn, fault, command, [f"rank {fault.rank}"])


def _on_two_hosts(turn: Round, hosts: str) -> list[str]:
    arguments = program(str(turn.folder), "--elastic", f"--steps={STEPS}")
    return [*on_hosts(hosts, " ".join(SURVIVING)), *arguments]


def kill_on_two_hosts(turn: Round) -> Outcome:
    """Kill -9 of a rank of two hosts."""
    return survived("kill-on-two-hosts", turn, [_one("kill", turn)], _on_two_hosts(turn, "2,2"))


def slow_link(turn: Round) -> Outcome:
    """The link of a host becomes a hundred times slower for a while: only time is lost."""
    fault = _one("link-slow", turn, lasts_s=turn.rng.uniform(0.2, 1.5), rate="10mbit")
    return survived("slow-link", turn, [fault], _on_two_hosts(turn, "2,2"))


def link_down(turn: Round) -> Outcome:
    """The network of the second host is cut: the first continues, and the second ends."""
    hosts = turn.rng.choice(["2,2", "2,1", "3,1"])
    second = range(int(hosts[0]), sum(map(int, hosts.split(","))))
    fault = _one("link-down", turn, ranks=second)
    return survived("link-down", turn, [fault], _on_two_hosts(turn, hosts), codes=(0, KILLED))


def full_disk(turn: Round) -> Outcome:
    """The disk with the checkpoints is full for some steps: training continues, saved checkpoints stay."""
    place = turn.folder / "checkpoints"
    place.mkdir()
    fault = _one("fill-disk", turn, moments=IN_A_STEP, steps=range(EVERY + 1, STEPS // 2), lasts_s=0.5)
    arguments = program(str(turn.folder), "--checkpoints", "--go-on", f"--steps={STEPS}", "--pause=0.02")
    outcome = survived("full-disk", turn, [fault], [*_own_disk(place), *mpirun(3), *arguments])
    events = read_events(turn.folder)
    for what in ("saved", "not saved"):
        if not any(event["event"] == what for event in events):
            outcome.wrong.append(f"nothing was {what}")
    return outcome


def _own_disk(place: Path) -> list[str]:
    """The prefix of a command that mounts a small disk of its own at `place`."""
    inside = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "--", "sh", "-c", inside, str(place)]


def _damaged(kind: str, turn: Round, damage: Callable[[random.Random, bytes], bytes]) -> Outcome:
    """Damage the newest checkpoint between two runs: the second loads the one before."""
    half, sizes = STEPS // 2, [turn.rng.choice([1, 2, 3, 4]) for _ in range(2)]
    arguments = (str(turn.folder), "--checkpoints")
    first = run_job([*mpirun(sizes[0]), *program(*arguments, f"--steps={half}")], QUIET_S)
    newest = max((turn.folder / "checkpoints").glob("step-*"), default=None)
    if first.code != 0 or newest is None:
        return Outcome(kind, wrong=[f"exit code {first.code}: {_end_of(first)}"])
    newest.write_bytes(damage(turn.rng, newest.read_bytes()))
    for journal in turn.folder.glob("rank-*.jsonl"):
        journal.unlink()
    outcome = survived(kind, turn, [], [*mpirun(sizes[1]), *program(*arguments, f"--steps={STEPS}")])
    outcome.faults, outcome.what = 1, f"{newest.name}, {sizes[0]} and then {sizes[1]} ranks"
    begun = [event["step"] for event in read_events(turn.folder) if event["event"] == "begin"]
    outcome.steps_lost = [half - begun[0]] if begun else []
    if newest.name not in outcome.said:
        outcome.wrong.append(f"{newest.name} was not spoken of")
    if set(begun) != {half - EVERY}:
        outcome.wrong.append(f"went on from {sorted(set(begun))}; the one before is of step {half - EVERY}")
    return outcome


def cut_checkpoint(turn: Round) -> Outcome:
    """The newest checkpoint is truncated: the one before is loaded."""
    return _damaged("cut-checkpoint", turn, lambda rng, content: content[: rng.randrange(len(content))])


def flip_checkpoint(turn: Round) -> Outcome:
    """A bit of the newest checkpoint is flipped: the one before is loaded."""

    def flip(rng: random.Random, content: bytes) -> bytes:
        place = rng.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]

    return _damaged("flip-checkpoint", turn, flip)


# What is in a host file, and what must be said about it. None: there is no file.
HOSTFILES: dict[str, tuple[str | None, str]] = {
    "a host that nobody knows": ("no-such-host.invalid slots=4\n", "no-such-host.invalid"),
    "no slots": ("{here} slots=0\n", "are already filled"),
    "too few slots": ("{here} slots=1\n", "not enough slots"),
    "slots that are no number": ("{here} slots=many\n", "bad parameter in the hostfile"),
    "negative slots": ("{here} slots=-4\n", "bad parameter in the hostfile"),
    "half a line": ("{here} slots=\n", "bad parameter in the hostfile"),
    "slots of nobody": ("slots=4\n", "parse error in the hostfile"),
    "a host twice": ("{here} slots=4\n{here} slots=4\n", "multiple definitions"),
    "nothing": ("", "No nodes are available"),
    "comments alone": ("# one host per line\n", "No nodes are available"),
    "bytes": ("\x01\xff\n", "parse error in the hostfile"),
    "no such file": (None, "host"),
}
KNOWS_OPEN_MPI = {"PRTE_MCA_rmaps_default_mapping_policy": ":nooversubscribe"}


def bad_hostfile(turn: Round) -> Outcome:
    """An invalid host file: an error message and no job."""
    name = turn.rng.choice(list(HOSTFILES))
    (content, says), path = HOSTFILES[name], turn.folder / "hosts"
    if content is not None:
        path.write_text(content.format(here=socket.gethostname()), encoding="latin-1")
    plainly = turn.rng.choice([True, False])
    run = mpirun(RANKS) if plainly else _mpisgd_run("-n", str(RANKS))
    command = [*run, "--hostfile", str(path), *program(str(turn.folder))[0 if plainly else 1 :]]
    ended = run_job(command, END_S, env=KNOWS_OPEN_MPI)
    outcome = Outcome("bad-hostfile", seconds=ended.seconds, recovery_s=[ended.seconds])
    outcome.what = f"{name}, {'mpirun' if plainly else 'mpisgd run'}"
    if ended.code in (0, None):
        outcome.wrong.append(f"exit code {ended.code}")
    if says not in ended.output or "Traceback" in ended.output:
        outcome.wrong.append(f"{says!r} was not said: {_end_of(ended) or 'nothing was said'}")
    return outcome


def _mpisgd_run(*options: str) -> list[str]:
    return [program()[0], "-m", "mpisgd", "run", *options]


KINDS: dict[str, Callable[[Round], Outcome]] = {
    "kill": kill,
    "kill-in-a-row": kill_in_a_row,
    "kill-plain": kill_plain,
    "kill-and-restart": kill_and_restart,
    "stop": stop,
    "stop-for-ever": stop_for_ever,
    "kill-on-two-hosts": kill_on_two_hosts,
    "slow-link": slow_link,
    "link-down": link_down,
    "full-disk": full_disk,
    "cut-checkpoint": cut_checkpoint,
    "flip-checkpoint": flip_checkpoint,
    "bad-hostfile": bad_hostfile,
}
HOST_KINDS = ("kill-on-two-hosts", "slow-link", "link-down")


def obstacle(kind: str) -> str:
    """Why a kind cannot run on this machine; empty if it can."""
    if kind in HOST_KINDS:
        from virtual_cluster import obstacle as no_hosts

        return no_hosts()
    if kind == "full-disk" and shutil.which("unshare") is None:
        return "missing: apt-get install util-linux"
    return ""
