"""What was measured beside the plan; `validate_plan.py report` writes this file."""

__all__ = ["MEASURED", "MOST_RANKS"]

MOST_RANKS = 8
MEASURED = (
    "DiLoCo(sync_every=#, outer_optimizer=<class 'torch.optim.sgd.SGD'>, outer_options=None, fragments=1, overlap_steps=0, overlap_alpha=#) + Compression.none",  # noqa: E501
    "ElasticAveraging(alpha=None, every=#) + Compression.none",
    "Gossip(topology=Ring(), style='adapt_then_combine', every=1, consensus_step=None) + Compression.none",
    "LocalSGD(sync_every=#, warmup_steps=0, hierarchy=None, average_state=False, growth=1.0, max_sync_every=None) + Compression.none",  # noqa: E501
    "Overlap(overlap=False) + Compression.none",
    "Parallel(pp=#) + Compression.none",
    "Parallel(pp=#, micro_batches=#) + Compression.none",
    "Parallel(pp=#, schedule='gpipe') + Compression.none",
    "Parallel(tp=#) + Compression.none",
    "Synchronous() + Compression.bf16",
    "Synchronous() + Compression.none",
    "Synchronous() + PowerSGD(rank=#, warmup_steps=0, error_feedback=True, min_compression_rate=1.0, seed=0)",
)
