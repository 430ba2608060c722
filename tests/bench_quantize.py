"""How long does quantize + pack take, and how much memory? Prints ratios, not times.

    python tests/bench_quantize.py

The yardstick is one pass of np.abs(x).max() over the same tensor, timed in turn with
each scheme, so that a busy machine slows both alike.
"""

import statistics
import time
import tracemalloc

import numpy as np

from kvq import Scheme, quantize

SHAPE = (8, 8192, 128)  # H_kv, T, D
REPEATS = 7
SCHEMES = {
    "per token": Scheme(4, "token", 64, "symmetric"),
    "per token, asymmetric": Scheme(4, "token", 64, "asymmetric"),
    "per channel": Scheme(4, "channel", 64, "symmetric"),
    "per channel, asymmetric": Scheme(4, "channel", 64, "asymmetric"),
}


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def time_ratios(x, scheme):
    """quantize + pack over one pass of abs-max, in `REPEATS` turns."""
    ratios = []
    for _ in range(REPEATS):
        one_pass = seconds(lambda: np.abs(x).max())
        ratios.append(seconds(lambda: quantize(x, scheme)) / one_pass)
    return ratios


def peak_over_input(x, scheme):
    """Peak memory of quantize + pack over the bytes of x (which it does not count)."""
    tracemalloc.start()
    quantize(x, scheme)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / x.nbytes


def main():
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    quantize(x[:1], SCHEMES["per token"])  # whatever happens once, happens here
    print(f"quantize + pack of {SHAPE} float32 at 4 bits, groups of 64")
    print(f"{'':<26}{'passes of abs-max':<22}{'spread':<18}peak / input bytes")
    for name, scheme in SCHEMES.items():
        ratios = time_ratios(x, scheme)
        median = statistics.median(ratios)
        spread = f"{min(ratios):.1f} .. {max(ratios):.1f}"
        peak = peak_over_input(x, scheme)
        print(f"{name:<26}{median:<22.1f}{spread:<18}{peak:.2f}")


if __name__ == "__main__":
    main()
