"""Encoding and decoding ggml blocks: our time over that of the package gguf.

    python tests/bench_formats.py

Prints ratios, not times: below 1 is faster than gguf. Both get the same array and give
bytes (a float32 array), in turns, so that a busy machine slows both alike. gguf cannot
encode iq4_nl and nvfp4.
"""

import statistics
import time

import gguf
import numpy as np

from kvq.formats.ggml import FORMATS

SHAPES = ((4096, 1024), (32768, 128))  # tokens, numbers per token
REPEATS = 7


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(ours, theirs):
    """Median of ours over theirs, and the smallest and largest of the ratios."""
    ratios = [seconds(ours) / seconds(theirs) for _ in range(REPEATS)]
    spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
    return f"{statistics.median(ratios):5.2f} ({spread})"


def encode_ratio(kind, x, ggml_type):
    try:
        gguf.quantize(x[:1], ggml_type)
    except NotImplementedError:
        return "-"
    return ratio(lambda: kind.encode(x), lambda: gguf.quantize(x, ggml_type).tobytes())


def decode_ratio(kind, x, ggml_type):
    size = kind.nbytes(x.shape)
    data = np.random.default_rng(1).integers(0, 100, size, dtype=np.uint8)
    rows, raw = data.reshape(len(x), -1), data.tobytes()
    return ratio(
        lambda: kind.decode(raw, x.shape),
        lambda: gguf.dequantize(rows, ggml_type).astype(np.float32),
    )


def main():
    for shape in SHAPES:
        x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        print(f"{shape} float32, our time over gguf's: median (spread) of {REPEATS}")
        print(f"{'':<14}{'encode':<26}decode")
        for name, kind in FORMATS.items():
            ggml_type = gguf.GGMLQuantizationType[name.partition(":")[2].upper()]
            encode, decode = (
                f(kind, x, ggml_type) for f in (encode_ratio, decode_ratio)
            )
            print(f"{name:<14}{encode:<26}{decode}", flush=True)


if __name__ == "__main__":
    main()
