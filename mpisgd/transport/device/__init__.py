"""The device transport: tensors on a GPU, through NCCL, CUDA-aware MPI, or pinned host memory."""
