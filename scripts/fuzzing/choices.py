"""What a program is drawn from: shapes, optimizers, strategies and compressors."""

from __future__ import annotations

SHAPES = ((1,), (3,), (7,), (2, 5), (), (129,), (40, 33), (2, 3, 2, 2))
TINY = ((1,), (1,), (), (2,))  # fewer elements than ranks
EMPTY = (0,)  # of which torch cannot compute every norm
LARGE = ((70_000,), (300, 250))  # more than what travels alone, as float64
TABLES = ((5, 2), (11, 3))
USERS = ("all", "none", "first", "last", "turns", "others")
HALVES = ("bfloat16", "float16")

EXACT_OPTIMIZERS = (
    ("SGD", {"lr": 0.5}),
    ("SGD", {"lr": 0.25, "momentum": 0.5}),
    ("SGD", {"lr": 0.5, "momentum": 0.5, "nesterov": True}),
    ("SGD", {"lr": 0.25, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.25}),
    ("SGD", {"lr": 0.125, "weight_decay": 0.5, "maximize": True}),
)
SMOOTH_OPTIMIZERS = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("Adadelta", {"lr": 1.0}),
    ("ASGD", {"lr": 0.01}),
)
ONE_BIT_OPTIMIZERS = (
    ("OneBitAdam", {"lr": 0.01, "freeze_step": 2}),
    ("OneBitAdam", {"lr": 0.01, "freeze_step": 100}),
    ("ZeroOneAdam", {"lr": 0.01, "var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1}),
    ("ZeroOneAdam", {"lr": 0.01, "var_freeze_step": 100, "var_update_scaler": 100}),
    ("OneBitLamb", {"lr": 0.01, "freeze_step": 2}),
)
CLOSURE_OPTIMIZERS = (
    ("LBFGS", {"lr": 0.1, "max_iter": 3}),
    ("LBFGS", {"lr": 0.1, "max_iter": 4, "history_size": 2}),
)
SPARSE_OPTIMIZERS = (("SGD", {"lr": 0.25}), ("Adagrad", {"lr": 0.01}))
SHARDED = (
    "mpisgd.Sharded(stage=1)",
    "mpisgd.Sharded(stage=2)",
    "mpisgd.Sharded(stage=1, overlap_forward=True)",
)
LOCAL = (
    "mpisgd.LocalSGD(sync_every=1)",
    "mpisgd.LocalSGD(sync_every=2)",
    "mpisgd.LocalSGD(sync_every=3)",
    "mpisgd.LocalSGD(sync_every=2, average_state=True)",
    "mpisgd.LocalSGD(sync_every=2, warmup_steps=2)",
    "mpisgd.LocalSGD(sync_every=1, growth=1.5)",
    "mpisgd.DiLoCo(2)",
    "mpisgd.DiLoCo(4, fragments=2)",
    "mpisgd.DiLoCo(3, fragments=2, overlap_steps=1)",
    "mpisgd.ElasticAveraging(every=2)",
    "mpisgd.Gossip('ring')",
    "mpisgd.Gossip('exponential')",
    "mpisgd.Gossip('one_peer_exponential')",
    "mpisgd.Gossip('complete', style='combine_then_adapt')",
)
COMPRESSORS = (
    "mpisgd.Compression.fp16",
    "mpisgd.Compression.bf16",
    "mpisgd.compress.TopK(ratio=0.3)",
    "mpisgd.compress.TopK(ratio=0.5, error_feedback=False)",
    "mpisgd.compress.RandomK(ratio=0.5)",
    "mpisgd.compress.Threshold(value=1.0)",
    "mpisgd.compress.DeepGradient(ratio=0.5)",
    "mpisgd.compress.DeepGradient(ratio=0.3, momentum=0.5, warmup_steps=2)",
    "mpisgd.compress.QSGD(bits=4)",
    "mpisgd.compress.QSGD(bits=2, segment=5, error_feedback=True)",
    "mpisgd.compress.TernGrad()",
    "mpisgd.compress.Natural()",
    "mpisgd.compress.SignSGD()",
    "mpisgd.compress.OneBit()",
    "mpisgd.compress.OneBit(two_step=True)",
    "mpisgd.compress.PowerSGD(rank=1)",
    "mpisgd.compress.PowerSGD(rank=2, warmup_steps=2)",
    "mpisgd.compress.PerHost(mpisgd.compress.TopK(ratio=0.5))",
)
CASTS = ("mpisgd.Compression.fp16", "mpisgd.Compression.bf16", "mpisgd.compress.TopK(ratio=1.0)")
