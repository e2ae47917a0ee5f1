"""What a program is drawn from: shapes, optimizers, and the examples of strategies and compressors."""

import mpisgd
from mpisgd.methods import catalogue
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.method_matrix import ONE_BIT

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
ONE_BIT_OPTIMIZERS = tuple((each.name, dict(each.settings)) for each in ONE_BIT)
CLOSURE_OPTIMIZERS = (
    ("LBFGS", {"lr": 0.1, "max_iter": 3}),
    ("LBFGS", {"lr": 0.1, "max_iter": 4, "history_size": 2}),
)
SPARSE_OPTIMIZERS = (("SGD", {"lr": 0.25}), ("Adagrad", {"lr": 0.01}))


def _sharded() -> tuple[str, ...]:
    """Those that are equal to one process on joined losses, wherever the hosts end."""
    return tuple(text_of(each) for each in mpisgd.Sharded.examples() if each.gradients is None)


def _coded() -> tuple[str, ...]:
    """Codes of what hosts send each other, with blocks shorter than parameters, and with longer ones."""
    texts = [
        text_of(mpisgd.compress.BlockQuantized(bits=bits, block=block))
        for bits, block in ((4, 5), (4, 256), (8, 64), (2, 9), (3, 30))
    ]
    parameters = text_of(mpisgd.compress.BlockQuantized(bits=8, block=20))
    return (
        *(f"gradients={text}" for text in texts),
        *(f"gradients={text}, parameters={parameters}" for text in texts[:3]),
        f"parameters={parameters}",
    )


# Drawn apart, so that the programs of seeds stay what they were before there were these.
BY_CHUNKS = (mpisgd.SparseLoCo, mpisgd.compress.ChunkTopK)


def _local() -> tuple[str, ...]:
    """The strategies whose ranks step with gradients of their own, and come to the same each time."""
    examples = [each for kind in catalogue.strategies() if kind not in BY_CHUNKS for each in kind.examples()]
    return tuple(
        text_of(each)
        for each in examples
        if not each.goes_with.op.goes
        and each.goes_with.repeats.goes
        and not each.goes_with.compression.why_not(mpisgd.Compression.none)
    )


def _compressors() -> tuple[str, ...]:
    examples = [each for kind in catalogue.compressors() if kind not in BY_CHUNKS for each in kind.examples()]
    return tuple(text_of(each) for each in examples if each != mpisgd.Compression.none)


def _chunked(kind: type[mpisgd.SparseLoCo | mpisgd.compress.ChunkTopK]) -> tuple[str, ...]:
    """The examples, and some with chunks of other lengths than those of any parameter."""
    first = {"sync_every": 2} if kind is mpisgd.SparseLoCo else {}
    others = (
        {"keep": 1, "chunk": 3, "error_decay": 0.5},
        {"keep": 5, "chunk": 64, "bits": 4},
        {"keep": 40, "chunk": 300, "bits": 8, "error_decay": 0.0},
    )
    return tuple(map(text_of, (*kind.examples(), *(kind(**first, **each) for each in others))))


SHARDED, CODED, LOCAL, COMPRESSORS = _sharded(), _coded(), _local(), _compressors()
SPARSE_LOCO, CHUNK_TOP_K = _chunked(mpisgd.SparseLoCo), _chunked(mpisgd.compress.ChunkTopK)
CASTS = ("mpisgd.Compression.fp16", "mpisgd.Compression.bf16", "mpisgd.compress.TopK(ratio=1.0)")
