"""One token through the attention of 32 layers, each with a cache of its own.

Our layers do what a model does: `KVCache.append` of the token, then attention. NumPy
and torch attend alone, as if to append cost nothing. The layers hold the same numbers
in memory of their own. Where all of them would take more than half of what is free, one
layer is used 32 times instead, and its row says so.
"""

import copy
import time

from kvq.cache import KVCache
from kvq.kernels.backends import one_line
from kvq.kernels.cpu import bench, fast, peers, yardsticks
from kvq.scheme import PRESETS

LAYERS = 32


def step_rows(scene, data, clock):
    """A row for each way to store the cache; one after the other, for their size."""
    rows, candidates = [], scene.candidates
    for i, candidate in enumerate(candidates):
        now = time.monotonic()
        share = max(clock.until - now, 0) / (len(candidates) - i)
        row = bench.new_row(scene, "step", candidate)
        try:
            clock.check()
            row |= _timed(scene, data, candidate, bench.Clock(now + share, clock.end))
        except TimeoutError as error:
            row["note"] = f"left out: {error}"
        except ImportError as error:
            row["note"] = f"absent: {one_line(error)}"
        except Exception as error:  # of any library: one line, and the run goes on
            row["note"] = f"failed: {one_line(error)}"
        rows.append(row)
    return rows


def _timed(scene, data, candidate, clock):
    """Seconds of a token, and the bytes of all layers."""
    make = _ours if candidate[0] == "kvq" else _theirs
    layers, nbytes, version = make(scene, data, candidate)

    def token():
        for attend in layers:
            attend()

    repeat = LAYERS // len(layers)
    rounds = clock.rounds(bench.seconds_of(token))
    seconds = [repeat * bench.seconds_of(token) for _ in range(rounds)]
    note = f"1 layer stands for {LAYERS}: no memory" if repeat > 1 else None
    facts = {"version": version, "nbytes": int(nbytes) * LAYERS, "note": note}
    return facts | bench.spread(seconds)


def _ours(scene, data, candidate):
    """([what a layer does], bytes of one, version)."""
    storage, T = candidate[2], scene.T
    kind = PRESETS.get(storage) or bench.policy(peers.BITS[storage], bench.GROUP)
    first = data.grown(KVCache(kind, layout="blocks"), T)
    count = LAYERS if _fit(first.policy, T) else 1
    caches = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
    q, new = data.queries(scene.ratio)[:, None], data.k[:, :1]

    def layer(cache):
        def attend():
            cache.append(new, new)
            return fast.decode(q, cache, threads=scene.threads)

        return attend

    version = fast.version_for(kind)
    return [layer(cache) for cache in caches], _nbytes(kind, T), version


def _theirs(scene, data, candidate):
    """The same of NumPy or torch."""
    peer, q = peers.DECODE[candidate], data.queries(scene.ratio)
    k, v = data.numbers(scene.T)
    start, nbytes = peer(q, k, v, scene.threads)
    layers = [start]
    if LAYERS * (nbytes + k.nbytes) < yardsticks.free_memory() / 2:
        for _ in range(LAYERS - 1):
            start, _ = peer(q, k.copy(), v.copy(), scene.threads)
            layers.append(start)
    return layers, nbytes, candidate[1]


def _nbytes(policy, T):
    """Of one layer's cache."""
    from kvq.memory import ModelShape, cache_bytes

    shape = ModelShape(layers=1, kv_heads=bench.H_KV, head_dim=bench.D)
    return cache_bytes(policy, shape, tokens=T)


def _fit(policy, T):
    """Whether all layers may be there at once; arrays that grow have room to spare."""
    return LAYERS * 1.25 * _nbytes(policy, T) < yardsticks.free_memory() / 2
