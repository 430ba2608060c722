"""The keys, values and queries of a model on a text, as a file that `load_kv` reads."""

import os
from pathlib import Path

import numpy as np

from kvq.dtypes import cast

KINDS = (".npz", ".safetensors")


def capture(model, tokens, layers, queries=64, dtype="float16"):
    """What the layers of a Decoder hand to attention, on an unquantized cache.

    tokens : T ids. layers : layer numbers. queries : keep those of the newest so many
    tokens; None: all.
    Returns a dict of arrays of `dtype`, for each layer N: k_N and v_N (H_kv, T, D),
    keys after RoPE and values; before_rope_N (H_kv, T, D), the same keys before it;
    q_N (H_q, queries, D), queries after RoPE. token_ids is int32 (T,).
    Raises ValueError for a layer that the model does not have.
    """
    L, T = model.config.layers, len(tokens)
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < L:
            raise ValueError(f"layer={layer!r}; valid: 0..{L - 1}")
    if queries is not None and not 1 <= queries <= T:
        raise ValueError(f"queries={queries!r}; valid: 1..{T} (tokens) or None")
    chunks = {layer: [] for layer in layers}

    def record(layer, heads):
        if layer in chunks:
            chunks[layer].append(heads)

    model.forward(tokens, model.caches("fp32"), record=record)
    arrays = {}
    for layer, heads in chunks.items():
        arrays |= _arrays(layer, heads, T - (queries or T), dtype)
    return arrays | {"token_ids": np.asarray(tokens, np.int32)}


def _arrays(layer, chunks, first_query, dtype):
    fields = {"k": "k", "v": "v", "before_rope": "k_before_rope", "q": "q"}
    whole = {
        name: np.concatenate([getattr(heads, field) for heads in chunks], axis=-2)
        for name, field in fields.items()
    }
    whole["q"] = whole["q"][:, first_query:]
    return {f"{name}_{layer}": cast(x, dtype) for name, x in whole.items()}


def check_kind(path):
    """`path` as a Path, if it names a kind of file that `save` writes."""
    path = Path(path)
    if path.suffix not in KINDS:
        raise ValueError(f"{path}: unknown kind of file; valid: {', '.join(KINDS)}")
    return path


def save(path, arrays):
    """Write arrays to a .npz or .safetensors file: it appears complete, or not at all.

    Raises ValueError for another kind of file.
    """
    path = check_kind(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        if path.suffix == ".npz":
            np.savez_compressed(temporary, **arrays)
        else:
            from safetensors.numpy import save_file

            # It writes memory as it lies, whatever the strides.
            save_file(
                {name: np.ascontiguousarray(x) for name, x in arrays.items()}, temporary
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
