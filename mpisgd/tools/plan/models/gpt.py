"""`gpt(layers=24, heads=16, dim=2048, context=2048)`: the model of `scripts/train_text.py` by its sizes.

For sequences of s tokens, width d, vocabulary v (Narayanan and others 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", without biases):

    parameters of a block  12 d^2 + 4 d         operations forward  24 s d^2 + 4 s^2 d
    of embedding and head  v d + s d, v d + 2 d                     2 s d v
    kept for the backward pass of a block  18 s d elements and the norms' statistics
"""

from dataclasses import replace

from mpisgd.arguments import check_positive, shown
from mpisgd.errors import InvalidArgument
from mpisgd.methods.from_text import call_of
from mpisgd.tools.plan.models.model import MOST_LAYERS, Layer, Model

__all__ = ["gpt", "gpt_from_text"]

BLOCK_ELEMENTS = 18  # kept, for each position and each of the width
STATISTICS = 2 * 4  # bytes of a norm for each position: mean and deviation in float32
MOST = 10**9  # of each other size than layers: sums of their products are floats
ALL_REDUCES = 2  # behind attention, and behind the feed-forward layers


def gpt(
    layers: int = 4,
    heads: int = 4,
    dim: int = 128,
    context: int = 128,
    vocabulary: int = 256,
    itemsize: int = 4,
) -> Model:
    """Return the sizes and operations of a GPT, of sequences of `context` tokens.

    Args:
        layers: of the transformer.
        heads: of attention, by which `dim` divides.
        dim: the width.
        context: tokens of a sequence.
        vocabulary: how many tokens there are.
        itemsize: bytes of a parameter and of an activation.

    Raises:
        InvalidArgument: a size is none.
    """
    sizes = {"layers": layers, "heads": heads, "dim": dim, "context": context, "vocabulary": vocabulary}
    for name, value in {**sizes, "itemsize": itemsize}.items():
        check_positive("gpt", name, value, whole=True)
        most = MOST_LAYERS if name == "layers" else MOST
        if value > most:
            raise InvalidArgument(f"gpt: {name}={shown(value)}; expected at most {most}")
    if dim % heads:
        raise InvalidArgument(f"gpt: dim={dim} does not divide by heads={heads}")
    state = context * dim * itemsize
    norm, square = (dim,), (dim, dim)
    shapes = (norm, norm, *[square] * 4, norm, norm, (4 * dim, dim), (dim, 4 * dim))
    attention = 4.0 * context**2 * dim
    flops = 24.0 * context * dim**2 + attention
    kept = BLOCK_ELEMENTS * state + 2 * STATISTICS * context
    block = Layer("", shapes, flops, kept, state, ALL_REDUCES, "", 2.0 * state, attention)
    blocks = [replace(block, name=f"block {n}") for n in range(layers)]
    embedding = Layer("embedding", ((vocabulary, dim), (context, dim)), 0.0, 8.0 * context, state)
    head = Layer(
        "head",
        (norm, norm, (vocabulary, dim)),
        2.0 * context * dim * vocabulary,
        2.0 * state + STATISTICS * context,
        float(context * vocabulary * itemsize),
    )
    text = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return Model(f"gpt({text})", (embedding, *blocks, head), itemsize)


def gpt_from_text(text: str) -> Model:
    """Return the model of a call such as `gpt(layers=24, dim=2048)`.

    Raises:
        InvalidArgument: it is none.
    """
    name, arguments, options = call_of("model", text)
    if name != "gpt":
        raise InvalidArgument(f"model {shown(text)}: expected such as gpt(layers=24, dim=2048)")
    try:
        return gpt(*arguments, **options)
    except TypeError as exc:
        raise InvalidArgument(f"model {shown(text)}: {exc}") from exc
