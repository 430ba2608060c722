"""Encoding and decoding the formats of other systems: our time over the package gguf's.

    python tests/bench_formats.py [ggml] [hf] [vllm]

Prints ratios, not times: below 1 is faster than gguf. A format of llama.cpp is timed
beside gguf's own of that name, and its goal is 1 (f32 and f16 are the same copy in
both, beside which our checks can be seen: 1.1); all others beside gguf's q4_0, and
theirs is 3. Both get the same array and give bytes (a float32 array), in turns, so that
a busy machine slows both alike. What is imported or compiled once is not timed.

vLLM's formats hold K and V: half of the heads are K, the others V. A record of latent
attention has its own width: as many of them as hold about as many numbers, and the
ratio is that of the times per number.

gguf works on 16 rows at a time, and rows of 128 numbers cost it more than long ones:
the row "gguf q4_0, rows of 1024" says how much of a ratio is due to that.
"""

import statistics
import sys
import time

import gguf
import numpy as np

from kvq.formats import all_formats

SYSTEMS = ("ggml", "hf", "vllm")
Q4_0 = gguf.GGMLQuantizationType.Q4_0
LLAMA_SHAPES = ((4096, 1024), (32768, 128))  # tokens, numbers per token
SHAPE = (1, 8, 4096, 128)  # B, H_kv, T, D
REPEATS = 7


# --- times ----------------------------------------------------------------------------
def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(ours, theirs, goal=None, work=1):
    """Median of ours over theirs, smallest and largest, and whether the goal is met.

    work : numbers of theirs over numbers of ours.
    """
    ours()
    ratios = []
    for _ in range(REPEATS):  # in both orders: the second finds warm caches
        a, b, c, d = map(seconds, (ours, theirs, theirs, ours))
        ratios.append(work * (a + d) / (b + c))
    middle = statistics.median(ratios)
    text = f"{middle:5.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
    if goal is None:
        return text
    return f"{text:<21} {'within' if round(middle, 2) <= goal else 'NOT within'} {goal}"


def row(name, encode, decode):
    print(f"{name:<28}{encode:<36}{decode}", flush=True)


def normal(shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# --- llama.cpp ------------------------------------------------------------------------
def llama_row(form, x):
    kind = gguf.GGMLQuantizationType[form.name.partition(":")[2].upper()]
    data = np.random.default_rng(1).integers(0, 100, form.nbytes(x.shape), np.uint8)
    rows, raw = data.reshape(len(x), -1), data.tobytes()
    encode, goal = "-", 1.1 if form.name in ("ggml:f32", "ggml:f16") else 1
    if can_encode(kind):
        encode = ratio(
            lambda: form.encode(x), lambda: gguf.quantize(x, kind).tobytes(), goal
        )
    decode = ratio(
        lambda: form.decode(raw, x.shape),
        lambda: gguf.dequantize(rows, kind).astype(np.float32),
        goal,
    )
    row(form.name, encode, decode)


def can_encode(kind):
    """gguf cannot encode iq4_nl and nvfp4."""
    try:
        gguf.quantize(np.zeros((1, 256), np.float32), kind)
    except NotImplementedError:
        return False
    return True


# --- Hugging Face and vLLM ------------------------------------------------------------
def other_row(form, x):
    blocks = gguf.quantize(x, Q4_0)
    if hasattr(form, "dim"):  # a record of latent attention, which is decoded only
        shape = x.size // form.dim, form.dim
        raw, encode = np.random.default_rng(1).bytes(form.nbytes(shape)), "-"
    else:
        tensors = [x] if form.name.startswith("hf:") else np.split(x[0], 2)
        shape, raw = tensors[0].shape, form.encode(*tensors)
        encode = ratio(
            lambda: form.encode(*tensors),
            lambda: gguf.quantize(x, Q4_0).tobytes(),
            goal=3,
        )
    decode = ratio(
        lambda: form.decode(raw, shape),
        lambda: gguf.dequantize(blocks, Q4_0),
        goal=3,
        work=x.size / np.prod(shape) if hasattr(form, "dim") else 1,
    )
    row(form.name, encode, decode)


def gguf_row(x):
    """gguf's time for the numbers of x in long rows, over its time for x."""
    y = x.reshape(-1, 1024)
    x_blocks, y_blocks = gguf.quantize(x, Q4_0), gguf.quantize(y, Q4_0)
    encode = ratio(lambda: gguf.quantize(y, Q4_0), lambda: gguf.quantize(x, Q4_0))
    decode = ratio(
        lambda: gguf.dequantize(y_blocks, Q4_0), lambda: gguf.dequantize(x_blocks, Q4_0)
    )
    row("gguf q4_0, rows of 1024", encode, decode)


def main(systems):
    print(f"our time over gguf's, float32: median (spread) of {REPEATS}")
    forms = {name: [] for name in SYSTEMS}
    for name, form in all_formats().items():
        forms.setdefault(name.partition(":")[0], []).append(form)
    for shape in LLAMA_SHAPES if "ggml" in systems else ():
        row(f"{shape}", "encode", "decode")
        for form in forms["ggml"]:
            llama_row(form, normal(shape))
    others = [
        form for name in ("vllm", "hf") if name in systems for form in forms[name]
    ]
    if others:
        row(f"{SHAPE}", "encode", "decode")
        gguf_row(normal(SHAPE))
    for form in others:
        other_row(form, normal(SHAPE))


if __name__ == "__main__":
    if set(sys.argv[1:]) - set(SYSTEMS):
        print(f"{' '.join(sys.argv[1:])}; valid: {' '.join(SYSTEMS)}", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1:] or SYSTEMS)
