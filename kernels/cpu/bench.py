"""`kvq bench cpu`: how fast pack, dequant and decode are here, beside other programs.

A *scene* is one shape and everything that is timed on it. Its candidates take turns, so
that whatever else the machine does hits them alike; a row has the median of their times
between the quartiles. Before it is timed, a result is compared with attention in
float64 over the keys and values that nobody has quantized (or with the input).

    memory      the yardsticks: bytes read, dot products started
    main        T = 65,536, 4 queries per KV head ("one head": 1 query). Every call is
                cold: before it, memory larger than the last-level cache is read. These
                reads are timed too, and are what its percents refer to
    sweep       from short contexts to long ones; calls follow each other (warm)
    grid        T = 8,192: queries per KV head, group size, threads, v2 (warm)
    pack        one tensor of T = 65,536; "pack all": of 8,192, on one thread (warm)
    step        a token through 32 layers: `model_step.py`

How often depends on the time that is left: each scene has a share of it. What does not
fit into time or memory is a row with a note.
"""

import os
import time
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from kvq.attention import empty_partial, merge, partial_attention
from kvq.cache import KVCache
from kvq.kernels.backends import backend, one_line
from kvq.kernels.cpu import codes, fast, peers, simd, threads, yardsticks
from kvq.scheme import Policy, Scheme

OPS = ("decode", "pack", "dequant", "step")
H_KV, D = 8, 128
TOKENS = tuple(2**n for n in range(6, 19))  # 64 .. 262,144
QUICK = (128, 512, 2048)
MAIN, GRID = 65536, 8192  # tokens, or the longest context that is asked for
STEPS = (8192, 65536)
RATIO, GROUP = 4, 64
SHAPES = (4, 64), (4, 32), (4, 128), (1, 64), (8, 64)  # of the grid: (ratio, group)
BITS = (8, 4, 2)
PEERS_MOST = 65536  # tokens: above, only our own kernels
PIECE = 4096  # tokens that a cache takes at a time
PERIOD = 65536  # after so many tokens the numbers repeat
TURN = 2e-3  # seconds: a turn of short calls is as many as fill it
LONG = 2e-2  # seconds: above, a call needs no other one before it
PAUSE = 4e-3  # seconds: threads that wait for more work in a loop give up by then
LEAST, MOST = 3, 21  # rounds
OVERTIME = 1.3  # times the seconds asked for: what would end later is left out
DOT = 64  # products of an instruction
LOOP = "numba", "loop", "float32"  # the read that percents refer to

COLUMNS = (
    *("scene", "op", "system", "version", "storage", "bits", "group"),
    *("T", "H_q", "H_kv", "D", "threads", "cold", "nbytes", "dots"),
    *("rounds", "seconds", "seconds_low", "seconds_high", "dram_percent"),
    *("roofline_seconds", "roofline_limit", "roofline_percent", "error", "note"),
)


@dataclass(frozen=True)
class Settings:
    """What is asked for.

    tokens : of the sweep. shapes : of the grid. only : a part of OPS. seconds : about
    how long all of it may take. memory : bytes of the yardstick's array at most.
    """

    tokens: tuple = TOKENS
    threads: int = 1
    shapes: tuple = SHAPES
    only: tuple = OPS[:-1]
    seconds: float = 300
    memory: int | None = None


@dataclass(frozen=True)
class Scene:
    """Candidates that take turns: (system, version, storage).

    ratio : H_q / H_kv. group : of the keys, per channel. share : of the time.
    """

    name: str
    op: str
    T: int
    candidates: tuple
    threads: int = 1
    ratio: int = RATIO
    group: int = GROUP
    cold: bool = False
    share: float = 2


# --- what is measured -----------------------------------------------------------------
def scenes(settings):
    """All scenes, short contexts first: caches grow from one to the next."""
    counts = tuple(dict.fromkeys((1, settings.threads)))
    found = [Scene("memory", "read", 0, (), n) for n in counts]
    if "decode" in settings.only:
        found += _sweep(settings)
        found += _cold(settings)
        found += _grid(settings, counts)
    if {"pack", "dequant"} & {*settings.only}:
        found += _packing(settings)
    if "step" in settings.only:
        found += _steps(settings)
    return sorted(found, key=lambda scene: (scene.op == "step", scene.T))


def _ours(*bits):
    return [("kvq", v, f"int{b}") for v in ("v4", "v3") for b in bits]


def _theirs(*without):
    """Peers that attend; without: what they store, or how they do it."""
    return [c for c in peers.DECODE if not {*c} & {*without}]


def _sweep(settings):
    few = _theirs("dequantize", "q8_0", "q4_0")
    for T in settings.tokens:
        candidates = (*_ours(4), *(few if T <= PEERS_MOST else []))
        yield Scene("sweep", "decode", T, candidates, settings.threads)


def _cold(settings):
    T, n = min(MAIN, max(settings.tokens)), settings.threads
    two = "kvq", "v4 two terms", "int8"
    everybody = (*_ours(*BITS), two, *_theirs())
    yield Scene("main", "decode", T, everybody, n, cold=True, share=30)
    alone = (*_ours(*BITS), *_theirs("dequantize"))
    yield Scene("one head", "decode", T, alone, n, ratio=1, cold=True, share=12)


def _grid(settings, counts):
    T = min(GRID, max(settings.tokens))
    for ratio, group in settings.shapes:
        candidates = _ours(*BITS)
        if group == GROUP:
            candidates += [("kvq", "v2", "int4"), *_theirs("dequantize")]
        for n in counts:
            yield Scene("grid", "decode", T, tuple(candidates), n, ratio, group)


def _packing(settings):
    everybody = [("kvq", per, f"int{b}") for per in ("token", "channel") for b in BITS]
    everybody += peers.PACK
    fast_ones = [c for c in everybody if c[0] in ("kvq", "numpy", "torch", "ggml")]
    four = tuple(c for c in fast_ones if c[2] in ("int4", "q4_0"))
    longest, n = max(settings.tokens), settings.threads
    yield Scene("pack", "pack", min(MAIN, longest), four, n, share=10)
    yield Scene("pack all", "pack", min(GRID, longest), tuple(everybody), share=10)


def _steps(settings):
    stored = [c for c in peers.DECODE if c[2] in ("float32", "bfloat16")]
    stored = [c for c in stored if c[0] == "numpy" or c[2] == "bfloat16"]
    stored += [("kvq", None, name) for name in ("int8", "int4", "kivi-2")]
    longest = max(settings.tokens)
    for T in dict.fromkeys(min(T, longest) for T in STEPS):
        yield Scene("step", "step", T, tuple(stored), settings.threads, share=10)


def run(settings, progress=iter):
    """The rows of one scene after the other. progress : tqdm, or nothing."""
    from kvq.kernels.cpu.model_step import step_rows

    begin, todo = time.monotonic(), scenes(settings)
    data = Tokens(max(scene.T for scene in todo))
    memory = yardsticks.Memory(settings.memory)
    shares = sum(scene.share for scene in todo)
    for scene in progress(todo):
        now = time.monotonic()
        left = max(begin + settings.seconds - now, 0)
        clock = Clock(
            now + left * scene.share / shares, begin + OVERTIME * settings.seconds
        )
        shares -= scene.share
        peers.use_threads(scene.threads)
        if scene.op == "read":
            yield yardstick_rows(scene, memory, clock)
        elif scene.op == "step":
            yield step_rows(scene, data, clock)
        else:
            yield scene_rows(scene, data, memory, clock, settings.only)


# --- data -----------------------------------------------------------------------------
class Tokens:
    """Random keys and values (H_kv, T, D), and caches that grow along them."""

    def __init__(self, most):
        rng = np.random.default_rng(0)
        numbers = np.empty((2, H_KV, min(most, PERIOD), D), np.float16)
        for head in numbers.reshape(-1, *numbers.shape[2:]):
            head[:] = rng.standard_normal(head.shape, np.float32)
        self.k, self.v = numbers
        heads = H_KV * max(ratio for ratio, _ in SHAPES)
        self.q = rng.standard_normal((heads, D), np.float32)
        self.caches, self.exact = {}, {}

    def queries(self, ratio):
        """float32 (H_q, D)."""
        return self.q[: H_KV * ratio]

    def numbers(self, T):
        """k, v float32 (H_kv, T, D), T <= PERIOD: arrays of their own."""
        return [x[:, :T].astype(np.float32) for x in (self.k, self.v)]

    def pieces(self, start, stop):
        """k, v of the tokens start .. stop - 1, float16, PIECE at a time."""
        while start < stop:
            end = min(stop, start - start % PIECE + PIECE)
            first = start - start % PERIOD
            yield [x[:, start - first : end - first] for x in (self.k, self.v)]
            start = end

    def cache(self, policy, layout, T):
        """The cache of this policy, grown to T tokens."""
        cache = self.caches.get((policy, layout)) or KVCache(policy, layout=layout)
        self.caches[policy, layout] = cache
        return self.grown(cache, T)

    def grown(self, cache, T):
        """The same cache with T tokens."""
        for k, v in self.pieces(len(cache), T):
            cache.append(k, v)
        return cache

    def attention(self, ratio, T):
        """Attention in float64, (H_q, D)."""
        if (ratio, T) not in self.exact:
            q = self.queries(ratio)[:, None]
            state = empty_partial(q.shape[:2], D)
            for k, v in self.pieces(0, T):
                state = merge(state, partial_attention(q, k, v))
            self.exact[ratio, T] = state.out[:, 0]
        return self.exact[ratio, T]


def policy(bits, group):
    """Keys per channel in groups of `group` tokens, values with a scale per token.

    Two bits get zeros as well: without, one of their four levels would be wasted.
    """
    levels = "asymmetric" if bits == 2 else "symmetric"
    return Policy(
        Scheme(bits, "channel", group, levels), Scheme(bits, "token", None, levels)
    )


# --- one scene ------------------------------------------------------------------------
def scene_rows(scene, data, memory, clock, only):
    """A row for each candidate and operation, timed; and one of the reads between."""
    stage = Stage(scene, data)
    found = []
    for candidate in scene.candidates:
        found += prepared(stage, candidate, clock, only)
    timed = [(row, start) for row, start in found if start]
    starts = [start for _, start in timed]
    costs = [seconds_of(start) for start in starts]
    before = partial(memory.read, scene.threads) if scene.cold else None
    rounds = clock.rounds(round_seconds(costs, before))
    times, reads = take_turns(starts, costs, rounds, before)
    for (row, _), seconds in zip(timed, times, strict=True):
        row |= spread(seconds)
    rows = [row for row, _ in found]
    if reads:
        rows.append(new_row(scene, "read", LOOP, nbytes=memory.nbytes) | spread(reads))
    return rows


def prepared(stage, candidate, clock, only):
    """[(row, what starts it)] of the operations that are asked for; a row with a note
    has None in place of the start."""
    scene = stage.scene
    ops = ("pack", "dequant") if scene.op == "pack" else ("decode",)
    facts, starts, note = {}, [None] * len(ops), None
    try:
        clock.check()
        stage.check_memory(candidate)
        starts, facts = stage.prepare(*candidate)
    except ImportError as error:
        note = f"absent: {one_line(error)}"
    except TimeoutError as error:
        note = f"left out: {error}"
    except MemoryError as error:
        note = f"left out: no memory ({one_line(error)})"
    except Exception as error:  # of any library: one line, and the run goes on
        note = f"failed: {one_line(error)}"
    rows = [new_row(scene, op, candidate, note=note, **facts) for op in ops]
    return [(r, s) for r, s in zip(rows, starts, strict=True) if r["op"] in only]


def new_row(scene, op, candidate, **facts):
    """What is known of a row before it is timed."""
    system, version, storage = candidate
    row = dict.fromkeys(COLUMNS)
    row |= {"scene": scene.name, "op": op, "system": system, "version": version}
    row |= {"storage": storage, "bits": peers.BITS.get(storage)}
    row |= {"threads": scene.threads, "cold": int(scene.cold)}
    if op in ("read", "dots"):
        return row | facts
    row |= {"T": scene.T, "H_kv": H_KV, "D": D}
    if op in ("decode", "step"):
        row["H_q"] = H_KV * scene.ratio
    if op != "step" and storage.startswith("int"):
        row["group"] = scene.group
    return row | {"group": peers.GROUPS.get(storage, row["group"])} | facts


class Stage:
    """What the candidates of a scene are given."""

    def __init__(self, scene, data):
        self.scene, self.data = scene, data

    @cached_property
    def numbers(self):
        """k, v float32, the same arrays for all."""
        return self.data.numbers(self.scene.T)

    def check_memory(self, candidate):
        """Raise MemoryError for one that may take more than there is: the numbers, what
        it stores, and as much again as it takes while it works."""
        scene = self.scene
        numbers = (1 if scene.op == "pack" else 2) * H_KV * scene.T * D
        ours = candidate[0] == "kvq" and scene.op == "decode"
        need, free = numbers * (2 if ours else 16), yardsticks.free_memory()
        if need > free:
            raise MemoryError(f"{need / 1e9:.2g} GB, {free / 1e9:.2g} are free")

    def prepare(self, system, version, storage):
        """([what to time], facts of the row); the result is compared here."""
        if self.scene.op == "pack":
            return self._pack(system, version, storage)
        scene, exact = self.scene, self.data.attention(self.scene.ratio, self.scene.T)
        if system == "kvq":
            start, nbytes, dots = self._decode(version, peers.BITS[storage])
        else:
            peer, q = peers.DECODE[system, version, storage], self._q
            (start, nbytes), dots = peer(q, *self.numbers, scene.threads), None
        facts = {"nbytes": int(nbytes), "dots": dots}
        return [start], facts | {"error": relative(start(), exact)}

    @property
    def _q(self):
        return self.data.queries(self.scene.ratio)

    def _decode(self, version, bits):
        """Ours: (start, bytes, dots)."""
        scene, q = self.scene, self._q[:, None]
        layout = "chunks" if version == "v2" else "blocks"
        cache = self.data.cache(policy(bits, scene.group), layout, scene.T)
        if version == "v2":
            return partial(backend("numba-cpu").decode, q, cache), cache.nbytes, None
        version, *two = version.split(" ", 1)
        terms = 2 if two else 1
        start = partial(
            fast.decode,
            q,
            cache,
            version=version,
            terms=terms,
            threads=scene.threads,
        )
        dots = needed_dots(scene, terms) if version == "v4" else None
        return start, cache.nbytes, dots

    def _pack(self, system, version, storage):
        """([pack, dequant], facts): bytes that go in and come out."""
        x, n = self.numbers[0], self.scene.threads
        if system == "kvq":
            scheme = Scheme(peers.BITS[storage], version, GROUP, "asymmetric")
            pack = partial(codes.pack, x, scheme, threads=n)
            dequant = partial(codes.dequant, threads=n)
            stored = pack()
            nbytes = stored.nbytes
        else:
            peer = peers.PACK[system, version, storage]
            pack, dequant, nbytes = peer(x.reshape(-1, D), GROUP, n)
            stored = pack()
        facts = {"nbytes": int(x.nbytes + nbytes)}
        facts["error"] = relative(dequant(stored), x)
        return [pack, partial(dequant, stored)], facts


def relative(x, exact):
    """|x - exact| / |exact|."""
    x = np.asarray(x).reshape(exact.shape)
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def needed_dots(scene, terms=1):
    """Instructions for the products of keys and of values, for each term."""
    products = H_KV * scene.ratio * scene.T * D
    return products * 2 * terms // DOT


def yardstick_rows(scene, memory, clock):
    """Reads by compiled loops and by NumPy's BLAS, and dot products, in turns."""
    starts = [partial(memory.read, scene.threads), memory.dot]
    candidates = (LOOP, ("numpy", "dot", "float32"))
    rows = [new_row(scene, "read", c, nbytes=memory.nbytes) for c in candidates]
    if simd.available():
        starts.append(partial(yardsticks.start_dots, scene.threads))
        count = starts[-1]()
        rows.append(new_row(scene, "dots", ("kvq", "v4", "int8"), dots=count))
    costs = [seconds_of(start) for start in starts]
    rounds = max(clock.rounds(sum(costs)), LEAST)  # nothing can be said without them
    times, _ = take_turns(starts, costs, rounds)
    return [row | spread(s) for row, s in zip(rows, times, strict=True)]


# --- clocks ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Clock:
    """until : when a scene should have ended. end : when it must have.

    Both as `time.monotonic` counts.
    """

    until: float
    end: float

    def check(self):
        """Raise TimeoutError if nothing more may begin."""
        if time.monotonic() > self.end:
            raise TimeoutError("no time")

    def rounds(self, seconds):
        """How many rounds of so many seconds; LEAST, if the end allows it; else 0."""
        now = time.monotonic()
        if now + LEAST * seconds > self.end:
            return 0
        return int(min(max((self.until - now) / seconds, LEAST), MOST))


def seconds_of(start, calls=1):
    """Seconds of one call."""
    begin = time.perf_counter()
    for _ in range(calls):
        start()
    return (time.perf_counter() - begin) / calls


def round_seconds(costs, before):
    """About how long a round of `take_turns` is."""
    if before:
        return sum(costs) + len(costs) * seconds_of(before) or TURN
    return sum(max(2 * cost, TURN) + PAUSE for cost in costs) or TURN


def take_turns(starts, costs, rounds, before=None):
    """Seconds of each start in every round, and of what came before each of them.

    before : makes caches cold. Without it there is a pause, and a short call comes
    after one that is not timed: it finds its data near, and its threads awake.
    """
    times, reads = [[] for _ in starts], []
    for _ in range(rounds):
        for start, cost, seconds in zip(starts, costs, times, strict=True):
            calls = 1
            if before:
                reads.append(seconds_of(before))
            else:
                time.sleep(PAUSE)
            if cost < LONG and not before:
                start()
                calls = max(int(TURN / cost), 1)
            seconds.append(seconds_of(start, calls))
    return times, reads


def spread(seconds):
    """The median of some times, and their quartiles; a note where there are none."""
    if not seconds:
        return {"note": "left out: no time"}
    low, middle, high = np.percentile(seconds, (25, 50, 75)).tolist()
    names = ("rounds", "seconds_low", "seconds", "seconds_high")
    return dict(zip(names, (len(seconds), low, middle, high), strict=True))


# --- after all scenes -----------------------------------------------------------------
def finished(rows):
    """The rows, with percents of what the machine can do.

    Cold rows are held beside the reads between them, others beside those of as many
    threads. The roofline is the slower of reading `nbytes` and starting `dots`.
    """
    timed = [row for row in rows if row["seconds"]]
    loops = [r for r in timed if (r["op"], r["system"]) == ("read", LOOP[0])]
    reads = {(r["scene"], r["threads"]): r["nbytes"] / r["seconds"] for r in loops}
    dots = [r for r in timed if r["op"] == "dots"]
    issue = {r["threads"]: r["dots"] / r["seconds"] for r in dots}
    return [_with_percents(row, reads, issue) for row in rows]


#     roofline = max(bytes / bandwidth, dots / issue rate)
def _with_percents(row, reads, issue):
    n = row["threads"]
    bandwidth = reads.get((row["scene"], n)) or reads["memory", n]
    if not row["seconds"] or not row["nbytes"]:
        return row
    limits = {"memory": row["nbytes"] / bandwidth}
    row = row | {"dram_percent": 100 * limits["memory"] / row["seconds"]}
    if row["op"] != "decode":
        return row
    if row["dots"]:
        limits["dots"] = row["dots"] / issue[n]
    limit = max(limits, key=limits.get)
    return row | {
        "roofline_seconds": limits[limit],
        "roofline_limit": limit,
        "roofline_percent": 100 * limits[limit] / row["seconds"],
    }


def conditions(settings):
    """Facts about this machine, for the head of the table."""
    return {
        "cores": threads.cores(),
        "threads": settings.threads,
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "last_level_cache": yardsticks.last_level_cache(),
        "free_memory": yardsticks.free_memory(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "all"),
        "seconds": f"{settings.seconds:g}",
    }
