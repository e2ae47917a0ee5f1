"""Measure what the links between the hosts of a job carry: the limit that its collectives are held against.

    mpirun -np 2 -hostfile hosts python scripts/emulation/link_rate.py
    ./scripts/cluster --hosts 2,2 --rate 1gbit -- python scripts/emulation/link_rate.py --json link.json

One rank of each host speaks, one pair of hosts at a time; the other ranks sleep. Plain MPI point to point,
without mpisgd: messages of 1 MiB of which several are under way, and for the latency a ping-pong of 8 bytes.
What counts is payload, so a link of 1 Gbit/s shows some 950 Mbit/s: TCP's headers take the rest.
"""

import argparse
import itertools
import json
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

MESSAGE_BYTES = 1 << 20
NUM_UNDER_WAY = 8
NUM_ROUNDS = 5
NUM_PINGS = 200
ROUND_S = 0.2  # how long one round should take: the first few packets are faster than the link
MAX_MESSAGES = 1024


@dataclass(frozen=True)
class Link:
    """What one pair of hosts measured.

    Attributes:
        hosts: names of the two.
        bytes_per_s: payload from the first to the second.
        both_ways_bytes_per_s: payload in each direction, while both send.
        one_way_s: half of a ping-pong's time, median.
    """

    hosts: tuple[str, str]
    bytes_per_s: float
    both_ways_bytes_per_s: float
    one_way_s: float


def stream(pair: MPI.Intracomm, num_messages: int, senders: tuple[int, ...]) -> float:
    """Send `num_messages` from each of `senders` to the other; the seconds until the last has come."""
    peer = 1 - pair.rank
    out = np.zeros(MESSAGE_BYTES, np.uint8)
    places = np.zeros((NUM_UNDER_WAY, MESSAGE_BYTES), np.uint8)
    pair.Barrier()
    start = time.perf_counter()
    for first in range(0, num_messages, NUM_UNDER_WAY):
        count = min(NUM_UNDER_WAY, num_messages - first)
        requests = [pair.Irecv(place, peer) for place in places[:count] if peer in senders]
        requests += [pair.Isend(out, peer) for _ in range(count) if pair.rank in senders]
        MPI.Request.Waitall(requests)
    pair.Barrier()  # the sender's last message may still be on its way
    return time.perf_counter() - start


def bytes_per_s(pair: MPI.Intracomm, senders: tuple[int, ...]) -> float:
    """The payload's rate in each direction that is in use: the best of some rounds, since it is a limit."""
    trial_s = stream(pair, NUM_UNDER_WAY, senders)
    wanted = int(ROUND_S / trial_s * NUM_UNDER_WAY)
    num_messages = pair.bcast(min(MAX_MESSAGES, max(NUM_UNDER_WAY, wanted)))
    times = [stream(pair, num_messages, senders) for _ in range(NUM_ROUNDS)]
    return num_messages * MESSAGE_BYTES / min(times)


def one_way_s(pair: MPI.Intracomm) -> float:
    """Half the time of a ping-pong."""
    word, peer = np.zeros(8, np.uint8), 1 - pair.rank
    times = []
    for _ in range(NUM_PINGS):
        start = time.perf_counter()
        for turn in (0, 1):
            if pair.rank == turn:
                pair.Send(word, peer)
            else:
                pair.Recv(word, peer)
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times)


def measure_pair(pair: MPI.Intracomm) -> Link:
    """Measure between the two ranks of `pair`. Collective over them."""
    first, second = pair.allgather(socket.gethostname())
    one_way, both_ways = bytes_per_s(pair, (0,)), bytes_per_s(pair, (0, 1))
    return Link((first, second), one_way, both_ways, one_way_s(pair))


def sleep_until_all_are_here(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the core to those who measure."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def measure(comm: MPI.Intracomm) -> list[Link]:
    """Measure between the hosts of `comm`, pair by pair; every rank gets all of it. Collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    speakers = [rank for rank, speaks in enumerate(comm.allgather(local.rank == 0)) if speaks]
    local.Free()
    links = []
    for ranks in itertools.combinations(speakers, 2):
        pair = comm.Split(0 if comm.rank in ranks else MPI.UNDEFINED)
        link = measure_pair(pair) if comm.rank in ranks else None
        if comm.rank in ranks:
            pair.Free()
        sleep_until_all_are_here(comm)
        links.append(comm.bcast(link, ranks[0]))
    return links


def table(links: list[Link]) -> str:
    """One line for each pair."""
    lines = [f"{'hosts':<24}{'Mbit/s':>10}{'both ways':>12}{'latency':>12}"]
    for link in links:
        rates = f"{link.bytes_per_s * 8e-6:>10.0f}{link.both_ways_bytes_per_s * 8e-6:>12.0f}"
        lines.append(f"{' - '.join(link.hosts):<24}{rates}{link.one_way_s * 1e6:>9.0f} us")
    return "\n".join(lines)


def main() -> None:
    """Print what the links carry, on rank 0."""
    parser = argparse.ArgumentParser(description="Measure the links between the hosts of a job.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the result, in bytes and seconds")
    options = parser.parse_args()
    links = measure(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(table(links) if links else "one host: no link to measure")
        if options.json:
            options.json.write_text(json.dumps([asdict(link) for link in links], indent=2) + "\n")


if __name__ == "__main__":
    main()
