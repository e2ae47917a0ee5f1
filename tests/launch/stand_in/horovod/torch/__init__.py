"""See `horovod`. Its background thread is busy all the time, as that of Horovod nearly is."""

import os
import threading

import torch
import torch.distributed as dist

Sum = 1


def gloo_built():
    return True


def init():
    setting = {name: os.environ[f"HOROVOD_{name}"] for name in ("CONTROLLER", "RANK", "SIZE", "LOCAL_RANK")}
    assert setting["CONTROLLER"] == "gloo"
    address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    store = dist.TCPStore(address, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(setting["RANK"]), world_size=int(setting["SIZE"]))
    threading.Thread(target=be_busy, daemon=True).start()


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
