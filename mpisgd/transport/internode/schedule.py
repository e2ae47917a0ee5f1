"""How hosts exchange what they have added up: by their number, so that all of them agree.

Between few hosts each sends each other one message, which takes one latency. The messages of a host grow with
the hosts, though, and what each takes of the processor adds up: with 8 hosts 7 messages take as long as the
latency of 3 rounds. Beyond, a logarithmic number of rounds is quicker.
"""

__all__ = ["CHUNK_BYTES", "FEW_HOSTS", "chunk_bytes", "halves", "num_messages"]

FEW_HOSTS = 8
# Measured at 1 and 10 Gbit/s: smaller chunks mean more of everything, larger ones fill the pipeline later.
CHUNK_BYTES = 2**18
MOST_BYTES = 2**20  # of many hosts, of whose chunks a message is a small part


def chunk_bytes(num_hosts: int) -> int:
    """Return the bytes of the chunks in which large messages pass between hosts."""
    return CHUNK_BYTES if num_hosts <= FEW_HOSTS else MOST_BYTES


def halves(num_hosts: int) -> bool:
    """Return whether chunks are exchanged by halving and doubling.

    Where hosts are no power of two, the rest would have to send and receive everything once more.
    """
    return num_hosts > FEW_HOSTS and num_hosts & (num_hosts - 1) == 0


def num_messages(num_hosts: int) -> int:
    """Return how many messages a leader sends for each chunk, one after the other."""
    return 2 * ((num_hosts - 1).bit_length() if halves(num_hosts) else num_hosts - 1)
