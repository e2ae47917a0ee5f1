"""See `horovod`: the server through which the processes find each other."""

from torch.distributed import TCPStore


class RendezvousServer:
    def __init__(self, verbose):
        self.store = None

    def start(self):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def init(self, plan):
        assert plan == []
