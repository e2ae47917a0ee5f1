"""A GPU that is simulated honestly: torch's device `simgpu`, whose streams do their work later than any host.

A tensor on it is an ordinary torch tensor with memory of its own. Kernels are queued on the current stream of
the thread and computed by the CPU's kernels when somebody waits for them, or some time later by themselves.
torch's own C++ (futures, autograd, `torch.Stream`, `torch.Event`) sees a device like CUDA.

    stream.py      the queues, and events
    guard.cpp, guard.py      what torch's C++ asks of a device; needs a C++ compiler
    allocator.py   the caching allocators
    memory.py      tensors over given memory
    kernels.py     the operations
    sparse.py      those of sparse tensors
    device.py      all of it, and `torch.simgpu`; `install()` is for the whole process and cannot be undone
    nccl.py        NCCL
    meeting.py     what carries its data where ranks are threads of one process
    process_group.py   torch's process groups on NCCL
    runtime.py     the device as mpisgd sees it
"""
