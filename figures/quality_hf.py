"""What the quantized caches of Transformers cost a model, beside ours, in one program.

    python figures/quality_hf.py      writes data/quality_hf.csv, or what it lacks

SmolLM2-135M, read and run by Transformers in float32; text, scored positions and
columns are those of `kvq eval`. Each query sees the cache as it is when its token is
the newest one. (`pieces` says how that is done without a run per token.) The positions
that are not scored come as a prompt: Transformers attends to a prompt before it
quantizes it. Ours, through `KVQCache`, starts at the first token.

Stored bits count every tensor that a cache holds at the end of a window, numbers in
float32 as 16 bits: a model that is served computes in 16 bits.

Needs the extras `hf` and `hf-peers`, a C++ compiler for quanto, and the weights
(`kvq model fetch smollm2-135m`).
"""

from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvq.layers import parse_policy
from kvq.model import evaluate, load, weights
from kvq.model.texts import bundled_tokens
from kvq.tables import provenance, write_table

OUT = Path(__file__).resolve().parent / "data/quality_hf.csv"
MODEL = "smollm2-135m"

# Settings of `QuantizedCache`, by our names for the formats. axis -1 of quanto wants
# a multiple of 64 tokens at each flush; the lengths here happen to be.
THEIRS = {
    "hf:quanto-int4-axis0": {"backend": "quanto", "nbits": 4},
    "hf:quanto-int2-axis0": {"backend": "quanto", "nbits": 2},
    "hf:quanto-int4-axis-1/axis0": {"backend": "quanto", "nbits": 4, "axis_key": -1},
    "hf:quanto-int2-axis-1/axis0": {"backend": "quanto", "nbits": 2, "axis_key": -1},
    "hf:hqq-int4-axis0": {"backend": "hqq", "nbits": 4},
    "hf:hqq-int2-axis0": {"backend": "hqq", "nbits": 2},
    "hf:hqq-int4-axis1": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hf:hqq-int2-axis1": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "hf:fp8": {"backend": "fp8"},
}
OURS = (
    *("int8-token", "int4-token-g64-asym", "int4-token-g32-asym"),
    *("int4-channel-g32/int4-token-g64-asym", "kivi-4", "kivi-2"),
)


# --- what a query sees ----------------------------------------------------------------
def pieces(policy, T):
    """0..T cut so that each token of a piece sees what it would see alone: (a, b).

    With i + 1 tokens, those before end(i) are quantized. After a piece whose last token
    is `last`, those before end(last) are: for query i <= last that is the same if
    min(end(last), i + 1) <= end(i).
    """
    end = [sum(policy.split(i + 1)[:2]) for i in range(T)]
    cuts = [0]
    for last in range(T):
        if any(min(end[last], i + 1) > end[i] for i in range(cuts[-1], last)):
            cuts.append(last)
    return list(pairwise([*cuts, T]))


def pieces_of_theirs(start, T, residual):
    """The same for a `QuantizedCache` and a prompt of `start` tokens.

    It quantizes when `residual` tokens have come since it last did, and hands them out
    unquantized until then.
    """
    return list(pairwise([0, *range(start, T, residual), T]))


def hidden_states(model, window, cache, pieces):
    """Normalized hidden states, float32 (T, width), of the ids in `window`."""
    import torch

    ids = torch.from_numpy(window.astype(np.int64))[None]
    with torch.no_grad():
        parts = [model.model(ids[:, a:b], cache=cache)[0][0] for a, b in pieces]
    return torch.cat(parts).numpy()


# --- what is stored -------------------------------------------------------------------
def tensors(thing):
    """Every tensor or array inside; one that is made of others counts as those."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, list | tuple):
        return [x for item in thing for x in tensors(item)]
    inner = [x for x in getattr(thing, "__dict__", {}).values() if is_tensor(x)]
    if inner:
        return tensors(inner)
    return [thing] if is_tensor(thing) else []


def is_tensor(x):
    return hasattr(x, "dtype") and hasattr(x, "shape")


def stored_bits(cache):
    """Bits of all tensors in a cache; a float32 number counts 16."""
    if hasattr(cache, "nbytes"):
        rows = [row for layer in cache.layers for row in layer.store.rows]
        found = [x for row in rows for stream in row for x in stream.arrays]
    else:
        found = tensors(
            [
                (x.keys, x.values, x._quantized_keys, x._quantized_values)
                for x in cache.layers
            ]
        )
    return sum(x.nbytes * (4 if str(x.dtype).endswith("float32") else 8) for x in found)


# --- the table ------------------------------------------------------------------------
def make(name, config, protocol):
    """A new cache called `name`, and the pieces in which a window comes."""
    from transformers import QuantizedCache

    from kvq.integrations.transformers import KVQCache

    T = protocol.window - 1
    if name not in THEIRS:
        policy = parse_policy(name)
        return KVQCache(policy, config), pieces(policy, T)
    cache = QuantizedCache(config=config, **THEIRS[name])
    residual = getattr(cache.layers[0], "residual_length", T)  # fp8 has no window
    return cache, pieces_of_theirs(protocol.start, T, residual)


def score(name, model, decoder, windows, exact, protocol):
    """A row of the table: `kvq.model.evaluate.summary` of all windows."""
    points = []
    for window, states in zip(windows, exact, strict=True):
        cache, cuts = make(name, model.config, protocol)
        changed = hidden_states(model, window[:-1], cache, cuts)[protocol.start :]
        targets = window[protocol.start + 1 :]
        c = decoder.config
        numbers = 2 * c.layers * c.kv_heads * c.head_dim * (len(window) - 1)
        points.append(
            evaluate.compare(decoder, states, changed, targets)
            | {"bits": stored_bits(cache) / numbers}
        )
    return evaluate.summary(name, points)


def main():
    from kvq.integrations.transformers import load_gguf

    path, protocol = weights.find(MODEL), evaluate.Protocol()
    windows = protocol.windows(bundled_tokens())
    facts = evaluate.setup(path, windows, protocol)
    rows = evaluate.resume(OUT, facts)
    facts["text"] = "kvq/data/austen_tokens.npy"
    model, decoder = load_gguf(path), load(path)
    exact = [
        hidden_states(model, w[:-1], None, [(0, len(w) - 1)])[protocol.start :]
        for w in windows
    ]
    for name in [*OURS, *THEIRS]:
        if name not in {row["policy"] for row in rows}:
            rows.append(score(name, model, decoder, windows, exact, protocol))
            print(rows[-1], flush=True)
            write_table(OUT, rows, facts | recorded())


def recorded():
    """When, where and with what."""
    facts = provenance("python figures/quality_hf.py")
    packages = ("torch", "transformers", "optimum-quanto", "hqq")
    facts["versions"] += "".join(f", {name} {version(name)}" for name in packages)
    return facts


if __name__ == "__main__":
    main()
