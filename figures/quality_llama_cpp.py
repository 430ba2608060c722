"""Perplexity of llama.cpp's cache types, beside the same formats in our decoder.

python figures/quality_llama_cpp.py     writes data/quality_llama_cpp.csv

Needs the weights (`kvq model fetch smollm2-135m`) and llama-cpp-python, which PyPI has
as source: some eleven minutes on one core,

    CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
        pip install llama-cpp-python==0.3.36

Both read the same weights and windows of tokens, and each is compared with its own
16-bit cache. They differ in arithmetic: llama.cpp multiplies 4-bit weights by 8-bit
activations, and 8-bit queries by quantized keys; ours is float32 throughout.

llama.cpp rotates quantized keys and values by a Hadamard matrix unless the variable
LLAMA_ATTN_ROT_DISABLE is set when a context is created. Its keys keep the channel order
of the file, where the two channels that RoPE turns together are neighbours, so its
blocks of 32 hold other channels than ours: for this comparison ours take its order.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvq.formats import find_format
from kvq.formats.base import Format
from kvq.formats.ggml import TYPE_IDS, rotate, rotation_size
from kvq.model import load, weights
from kvq.model.decoder import Decoder
from kvq.model.evaluate import (
    BLOCK,
    Protocol,
    compare,
    compare_logits,
    hidden_states,
    setup,
    summary,
)
from kvq.model.texts import bundled_tokens
from kvq.tables import provenance, write_table

OUT = Path(__file__).resolve().parent / "data" / "quality_llama_cpp.csv"
TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
CASES = [("f16", False), *((t, rotated) for t in TYPES for rotated in (False, True))]


# --- llama.cpp ------------------------------------------------------------------------
def llama_logits(path, window, kind, rotated):
    """Logits after each token of a window but the last, float32 (n, vocab)."""
    from llama_cpp import Llama

    os.environ["LLAMA_ATTN_ROT_DISABLE"] = "0" if rotated else "1"
    model = Llama(
        str(path),
        n_ctx=len(window),
        n_threads=1,
        n_threads_batch=1,
        flash_attn=True,  # without it, values cannot be quantized
        type_k=TYPE_IDS[kind],
        type_v=TYPE_IDS[kind],
        logits_all=True,
        verbose=False,
    )
    model.eval(window[:-1].tolist())
    z = model.scores[: len(window) - 1].copy()
    model.close()
    return z


def llama_points(path, windows, start):
    """{(kind, rotated): a point per window}, as `summary` takes them."""
    points = {case: [] for case in CASES}
    for window in windows:
        z = llama_logits(path, window, "f16", False)[start:]
        for case in CASES:
            z_hat = llama_logits(path, window, *case)[start:]
            points[case].append(_in_blocks(z, z_hat, window[start + 1 :]))
            print("llama.cpp", *case, f"KL {points[case][-1]['kl'].mean():.4f}")
    return points


def _in_blocks(z, z_hat, targets):
    parts = [
        compare_logits(*(x[n : n + BLOCK] for x in (z, z_hat, targets)))
        for n in range(0, len(targets), BLOCK)
    ]
    return {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}


# --- ours -----------------------------------------------------------------------------
def file_order(x):
    """Channels (..., D) from half a head apart to side by side, as in the file."""
    pairs = x.reshape(*x.shape[:-1], 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(x.shape)


def stored(x, kind, rotated):
    """x (H, t, D) through the bytes of a format, each token by itself."""
    size = rotation_size(x.shape[-1])
    x = rotate(x, size) if rotated else x
    x = kind.decode(kind.encode(x), x.shape)
    return rotate(x, size) if rotated else x


@dataclass(frozen=True, eq=False)
class Stored(Decoder):
    """A decoder whose keys and values went through `stored` before they are seen."""

    kind: Format
    rotated: bool

    def heads(self, i, x, positions):
        h = super().heads(i, x, positions)
        k, v = (stored(x, self.kind, self.rotated) for x in (file_order(h.k), h.v))
        return replace(h, q=file_order(h.q), k=k, v=v)


def our_points(path, windows, start):
    """The same of our formats in our decoder, against a float32 cache."""
    model = load(path)
    D = model.config.head_dim
    points = {case: [] for case in CASES}
    for window in windows:
        exact, _ = hidden_states(model, window, start, "fp32", "float32")
        for kind, rotated in CASES:
            ours = Stored(
                **vars(model), kind=find_format(f"ggml:{kind}"), rotated=rotated
            )
            hidden, _ = hidden_states(ours, window, start, "fp32", "float32")
            point = compare(model, exact, hidden, window[start + 1 :])
            points[kind, rotated].append(point)
            print("ours     ", kind, rotated, f"KL {point['kl'].mean():.4f}")
    bits = {k: find_format(f"ggml:{k}").bits_per_element((1, D)) for k, _ in CASES}
    return points, bits


# --- the table ------------------------------------------------------------------------
def table(ours, llama, bits):
    """A row per case and system, and how far the two changes are apart.

    difference_percent : change of llama.cpp minus ours. difference_se_percent : the
    standard error of the paired difference, position by position.
    """
    rows = []
    for kind, rotated in CASES:
        pair = ours[kind, rotated], llama[kind, rotated]
        d, d_llama = (np.concatenate([p["d"] for p in points]) for points in pair)
        apart = d_llama - d
        for system, points in zip(("kvq", "llama.cpp"), pair, strict=True):
            points = [p | {"bits": float(bits[kind])} for p in points]
            row = {
                "system": system,
                "type": kind,
                "rotated": "yes" if rotated else "no",
            }
            row |= summary(kind, points)
            del row["policy"]
            row["difference_percent"] = 100 * float(apart.mean())
            se = float(apart.std(ddof=1)) / np.sqrt(len(apart))
            row["difference_se_percent"] = 100 * float(se)
            rows.append(row)
    return rows


def main():
    import llama_cpp

    path, protocol = weights.find("smollm2-135m"), Protocol()
    windows = protocol.windows(bundled_tokens())
    llama = llama_points(path, windows, protocol.start)
    ours, bits = our_points(path, windows, protocol.start)
    header = setup(path, windows, protocol)
    header["text"] = "kvq/data/austen_tokens.npy"
    header |= provenance("python figures/quality_llama_cpp.py")
    header["versions"] += f", llama-cpp-python {llama_cpp.__version__}"
    write_table(OUT, table(ours, llama, bits), header)


if __name__ == "__main__":
    main()
