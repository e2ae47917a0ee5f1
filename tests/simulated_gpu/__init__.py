"""A GPU that is simulated honestly: torch's device `simgpu`, whose streams do their work later than any host.

A tensor on it is an ordinary torch tensor with memory of its own. Kernels are queued on the current stream of the
thread and computed by the CPU's kernels when somebody waits for them, or some time later by themselves. torch's own
C++ (futures, autograd, `torch.Stream`, `torch.Event`) sees a device like CUDA. `stream.py` has the queues, `guard.cpp`
what torch's C++ asks of a device, `allocator.py` the caching allocators, `kernels.py` the operations, `nccl.py` NCCL.

`install()` makes the device known to torch; it is for the whole process and cannot be undone. It needs a C++ compiler.
"""
