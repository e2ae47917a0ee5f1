"""See `horovod`. Its background thread is busy all the time, as that of Horovod nearly is."""

import os
import threading

import torch
import torch.distributed as dist

Sum = 1


def gloo_built():
    return True


def mpi_built():
    return "STAND_IN_MPI" in os.environ


def init():
    if os.environ["HOROVOD_CONTROLLER"] == "mpi":
        rank, size, address, port = meet_over_mpi()
    else:
        assert os.environ["HOROVOD_CONTROLLER"] == "gloo"
        rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
        address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    store = dist.TCPStore(address, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    threading.Thread(target=be_busy, daemon=True).start()


def meet_over_mpi():
    from mpi4py import MPI

    global server
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(server.port if comm.rank == 0 else None)
    return comm.rank, comm.size, "127.0.0.1", port


def size():
    return dist.get_world_size()


def be_busy():
    while True:
        pass


def rank():
    return dist.get_rank()


def barrier():
    dist.barrier()


def allreduce_(tensor, name, op):
    dist.all_reduce(tensor)
    return tensor


def alltoall(tensor, name):
    output = torch.empty_like(tensor)
    dist.all_to_all_single(output, tensor)
    return output, torch.ones(dist.get_world_size())


def DistributedOptimizer(optimizer, named_parameters):
    params, step = [param for _, param in named_parameters], optimizer.step

    def averaged_step():
        for param in params:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
        step()

    optimizer.step = averaged_step
    return optimizer
