"""`decode` in both languages, run from its PTX: right, coalesced, blind to garbage.

The kernels are given arrays made here, not a cache. Whatever lies past a sequence's
lengths, and every output before it is written, is all ones: NaN, or the code 255. The
simulator also reports every access out of bounds and every race.
"""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from fresh import compiled

from kvq.kernels import ptxsim
from kvq.kernels.decode import tile
from kvq.kernels.launch import nvrtc
from kvq.kernels.layouts import row_words, to_words

DTYPES = {"__half": np.float16, "float": np.float32, "__nv_bfloat16": np.uint16}
SOURCES = {
    "v1": "decode/v1_two_pass",
    "v2": "decode/v2_online_softmax",
    "v3": "decode/v3_split_kv",
}
# Quantized and exact tokens; the last sequence gives every warp several tiles.
LENGTHS = ((75, 11), (0, 0), (33, 0), (0, 5), (290, 37))


def garbage(*shape, dtype=np.float32):
    """All bits set."""
    size = max(math.prod(shape), 1) * np.dtype(dtype).itemsize
    return np.full(size, 0xFF, np.uint8).view(dtype)[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class Case:
    """Keys: bits, group, per channel?, asymmetric? Values likewise, per token."""

    D: int = 64
    H_kv: int = 2
    ratio: int = 3
    key: tuple = (4, 32, False, True)
    value: tuple = (4, 64, False, True)
    X: str = "__half"
    S: str = "__half"
    lengths: tuple = LENGTHS
    softcap: float = 0.0
    sinks: bool = False
    tokens_per_split: int = 64
    seed: int = 0

    @property
    def shape(self):
        """B, H_q, H_kv, T_cap, R_cap; room for 32 more tokens at most."""
        longest, exact = np.max(self.lengths, axis=0)
        T_cap = (int(longest) // 32 + 1) * 32
        B, H_kv = len(self.lengths), self.H_kv
        return B, H_kv * self.ratio, H_kv, T_cap, int(exact) + 2


@dataclass(frozen=True, eq=False)
class Side:
    """codes (B, H_kv, T_cap, D), scale and zero, exact, and x_hat of each sequence."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    exact: np.ndarray
    x_hat: list


def make_side(case, scheme, rng):
    (B, _, H_kv, T_cap, R_cap), D = case.shape, case.D
    bits, group, per_channel, asymmetric = scheme
    gt, gc = (group, 1) if per_channel else (1, group)
    groups = (B, H_kv, -(-T_cap // gt), -(-D // gc))
    codes = rng.integers(0, 2**bits, (B, H_kv, T_cap, D), dtype=np.uint8)
    scale, zero = (garbage(*groups, dtype=DTYPES[case.S]) for _ in range(2))
    exact = garbage(B, H_kv, R_cap, D, dtype=DTYPES[case.X])
    x_hat = []
    for b, (n, r) in enumerate(case.lengths):
        used = -(-n // gt)
        size = (H_kv, used, groups[-1])
        scale[b, :, :used] = rng.uniform(0.5, 1.5, size) / 2 ** (bits - 1)
        if asymmetric:
            zero[b, :, :used] = rng.standard_normal(size) - 0.5
        numbers = to_x(rng.standard_normal((H_kv, r, D)), case.X)
        exact[b, :, :r] = numbers
        s, z = (
            a[b].repeat(gt, 1)[:, :n].repeat(gc, 2)[..., :D].astype(np.float32)
            for a in (scale, zero)
        )
        level = codes[b, :, :n].astype(np.float32)
        x = s * level + z if asymmetric else s * (level - 2 ** (bits - 1))
        x_hat.append(np.concatenate([x, to_float(numbers, case.X)], axis=1))
        codes[b, :, n:] = 2**bits - 1
    return Side(codes, scale, zero if asymmetric else scale[:0], exact, x_hat)


def to_x(x, X):
    """x as it is stored; bfloat16 is the upper half of a float32."""
    if X != "__nv_bfloat16":
        return x.astype(DTYPES[X])
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def to_float(x, X):
    if X != "__nv_bfloat16":
        return x.astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, eq=False)
class Problem:
    case: Case
    q: np.ndarray
    k: Side
    v: Side
    sinks: np.ndarray

    @property
    def scale(self):
        return np.float32(self.case.D**-0.5)

    def attention(self, dtype):
        """The equation, in this dtype throughout."""
        case, q = self.case, to_float(self.q, self.case.X).astype(dtype)
        out = np.zeros(q.shape, dtype)
        for b, h in np.ndindex(q.shape[:2]):
            k, v = (s.x_hat[b][h // case.ratio].astype(dtype) for s in (self.k, self.v))
            S = dtype(self.scale) * (k @ q[b, h])
            if case.softcap:
                S = dtype(case.softcap) * np.tanh(S / dtype(case.softcap))
            sink = self.sinks[h : h + 1].astype(dtype) if case.sinks else S[:0]
            m = max([*S, *sink], default=0)
            l = np.exp(S - m).sum() + np.exp(sink - m).sum()  # noqa: E741
            out[b, h] = np.exp(S - m) / l @ v if len(S) else 0
        return out


def make(case):
    rng = np.random.default_rng(case.seed)
    B, H_q = case.shape[:2]
    q = to_x(rng.standard_normal((B, H_q, case.D)), case.X)
    k, v = (make_side(case, scheme, rng) for scheme in (case.key, case.value))
    return Problem(case, q, k, v, rng.standard_normal(H_q).astype(np.float32))


# --- launching ------------------------------------------------------------------------
def launch(language, version, kernel, constants, grid, block, args):
    key = tuple(sorted(constants.items()))
    code = compiled(language, SOURCES[version], kernel, key)
    args = [np.int32(a) if isinstance(a, int) else a for a in args]
    args = [a.reshape(-1) if isinstance(a, np.ndarray) else a for a in args]
    return code.launch(
        grid, block, args if language == "c" else ptxsim.numba_args(args)
    )


def constants_of(case, **more):
    D, (kb, kg, kc, ka), (vb, vg, _, va) = case.D, case.key, case.value
    c = {"HEAD_DIM": D, "KEY_BITS": kb, "KEY_GROUP": kg, "KEY_PER_CHANNEL": int(kc)}
    c |= {"KEY_ASYMMETRIC": int(ka), "VALUE_BITS": vb, "VALUE_GROUP": vg}
    c |= {"VALUE_ASYMMETRIC": int(va), "X": case.X, "S": case.S, **more}
    return c | {"WARPS": tile.warps(SimpleNamespace(**c))}


def inputs(p, layout):
    """q ... lengths, as every version takes them."""
    arrays = [p.q]
    for side, scheme in ((p.k, p.case.key), (p.v, p.case.value)):
        words = to_words(side.codes, scheme[0], layout)
        assert words.shape[-1] == row_words(p.case.D, scheme[0], layout)
        none = np.zeros(1, side.scale.dtype)
        arrays += [words, side.scale, side.zero if side.zero.size else none]
    return [*arrays, p.k.exact, p.v.exact, np.array(p.case.lengths, np.int32)]


def run(language, version, p):
    """(out, counters of the first kernel)"""
    out = garbage(*p.q.shape)
    return out, {"v1": run_v1, "v2": run_v2, "v3": run_v3}[version](language, p, out)


def run_v1(language, p, out):
    case, (B, H_q, _, T_cap, R_cap) = p.case, p.case.shape
    settings = []
    for bits, group, per_channel, asymmetric in (case.key, case.value):
        gt, gc = (group, 1) if per_channel else (1, group)
        settings += [bits, gt, gc, int(asymmetric)]
    args = [*inputs(p, "canonical"), p.sinks, garbage(B * H_q * (T_cap + R_cap)), out]
    args += [*case.shape, case.D, *settings, int(case.sinks)]
    args += [p.scale, np.float32(case.softcap)]
    types = {"X": case.X, "S": case.S}
    return launch(language, "v1", "decode_v1", types, B * H_q, 128, args)


def run_v2(language, p, out):
    case, c = p.case, constants_of(p.case)
    args = [*inputs(p, "paired"), p.sinks, out, *case.shape, int(case.sinks)]
    args += [p.scale, np.float32(case.softcap)]
    grid = math.prod(case.shape[:2])
    return launch(language, "v2", "decode_v2", c, grid, 32 * c["WARPS"], args)


def run_v3(language, p, out):
    case, c = p.case, constants_of(p.case, RATIO=p.case.ratio)
    B, H_q, H_kv, _, _ = case.shape
    tokens = case.tokens_per_split
    splits = -(-max(map(sum, case.lengths)) // tokens) or 1
    part_o, part_ml = garbage(splits, B, H_q, case.D), garbage(splits, B, H_q, 2)
    args = [*inputs(p, "paired"), part_o, part_ml, *case.shape]
    args += [p.scale, np.float32(case.softcap), splits, tokens]
    grid = splits * B * H_kv * tile.chunks_and_heads(case.ratio)[0]
    counters = launch(language, "v3", "decode_v3", c, grid, 32 * c["WARPS"], args)
    args = [part_o, part_ml, p.sinks, out, B, H_q, splits, int(case.sinks)]
    launch(language, "v3", "decode_v3_merge", c, B * H_q, 128, args)
    return counters


# --- right ----------------------------------------------------------------------------
def check(language, version, case):
    p = make(case)
    out, _ = run(language, version, p)
    exact, naive = p.attention(np.float64), p.attention(np.float32)
    error = np.linalg.norm(out - exact)
    assert error <= 2 * np.linalg.norm(naive - exact)
    unseen = [b for b, lengths in enumerate(case.lengths) if sum(lengths) == 0]
    assert (out[unseen] == 0).all()


CASES = {
    "8 and 2 bits": Case(key=(8, 32, False, True), value=(2, 32, False, True)),
    "3 and 8 bits": Case(
        key=(3, 40, True, False), value=(8, 64, False, False), S="float", ratio=2,
        tokens_per_split=160,
    ),
    "2 and 3 bits": Case(
        key=(2, 48, False, True), value=(3, 24, False, True), D=96, softcap=3.0,
        sinks=True,
    ),
    "80 channels": Case(
        key=(3, 20, False, True), value=(4, 80, False, False), D=80, H_kv=1, X="float",
        ratio=1,
    ),
    "128 channels, small groups of tokens": Case(
        key=(4, 5, True, True), value=(3, 32, False, True), D=128, H_kv=1, ratio=5,
        tokens_per_split=160, sinks=True,
    ),
    "256 channels": Case(
        key=(8, 64, True, True), value=(8, 16, False, True), D=256, H_kv=1, ratio=2,
        S="float",
    ),
    "7 heads, bfloat16": Case(
        key=(4, 64, False, False), value=(2, 8, False, True), H_kv=1, ratio=7,
        X="__nv_bfloat16",
    ),
    "17 heads in three blocks": Case(
        key=(2, 32, True, True), value=(4, 64, False, True), H_kv=2, ratio=17,
        lengths=((41, 9), (64, 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", SOURCES)
def test_attention_is_within_twice_the_error_of_naive_float32(version, name):
    check("c", version, CASES[name])


TWINS = {
    "v1": replace(CASES["3 and 8 bits"], softcap=2.0, sinks=True),
    "v2": replace(CASES["3 and 8 bits"], softcap=2.0, sinks=True),
    "v3": Case(key=(4, 16, False, True), value=(2, 32, False, True), sinks=True),
}


@pytest.mark.parametrize("version", SOURCES)
def test_the_numba_twin_gives_what_the_cuda_c_gives(version):
    check("numba", version, TWINS[version])
    p = make(TWINS[version])
    twin, _ = run("numba", version, p)
    out, _ = run("c", version, p)
    np.testing.assert_array_max_ulp(twin, out, maxulp=4)


def test_the_result_does_not_depend_on_the_other_sequences():
    both = make(Case(lengths=((75, 11), (33, 4))))
    out, _ = run("c", "v3", both)
    sides = [
        Side(*(a[:1] for a in (s.codes, s.scale, s.zero, s.exact)), s.x_hat[:1])
        for s in (both.k, both.v)
    ]
    alone = Problem(Case(lengths=((75, 11),)), both.q[:1], *sides, both.sinks)
    np.testing.assert_array_equal(run("c", "v3", alone)[0], out[:1])


def test_the_number_of_splits_changes_rounding_alone():
    p = make(Case(lengths=((200, 30), (7, 0))))
    outs = [
        run("c", "v3", replace(p, case=replace(p.case, tokens_per_split=n)))[0]
        for n in (32, 96, 256)
    ]
    assert not np.array_equal(outs[0], outs[2])
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("version", SOURCES)
def test_scores_whose_exponentials_overflow(version):
    p = make(Case(lengths=((140, 9),)))
    p.q[:] *= 300
    exact = p.attention(np.float64)
    k = p.k.x_hat[0].repeat(3, axis=0)
    assert (np.abs(k @ p.q[0, ..., None]) * p.scale).max() > 1000
    np.testing.assert_allclose(run("c", version, p)[0], exact, rtol=0, atol=1e-3)


# --- cheap ----------------------------------------------------------------------------
USUAL = Case(D=128, ratio=4, lengths=((1024, 0),), tokens_per_split=512)
PER_CHANNEL = replace(USUAL, key=(4, 32, True, True))


@pytest.mark.parametrize("case", [USUAL, PER_CHANNEL], ids=["token", "channel"])
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_no_sector_is_fetched_twice_and_no_bank_is_busy(version, case):
    _, counters = run("c", version, make(case))
    assert counters.sectors <= 1.05 * counters.ideal_sectors
    assert counters.wavefronts <= 1.1 * counters.ideal_wavefronts


def test_one_read_of_keys_and_values_serves_a_group_of_heads():
    tokens, numbers = USUAL.H_kv * 1024, USUAL.H_kv * 1024 * USUAL.D
    groups = tokens * (128 // USUAL.key[1] + 128 // USUAL.value[1])
    stored = (2 * numbers * 4 / 8 + 2 * groups * 2) / 32  # sectors
    cost = {}
    for ratio in (1, 4, 8):
        _, cost[ratio] = run("c", "v3", make(replace(USUAL, ratio=ratio)))
    # What is more belongs to the heads: q, and the states of the splits.
    assert stored < cost[1].sectors < cost[8].sectors < 1.1 * stored
    # A word is turned into numbers once.
    assert cost[1].instructions < cost[4].instructions < 1.6 * cost[1].instructions
    assert 32 * cost[4].instructions < 40 * (2 * numbers * 4 / 8)
    _, v2 = run("c", "v2", make(USUAL))
    assert v2.sectors > 3.9 * stored


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("D", "bits", "ratio"), [(128, 4, 4), (256, 8, 8), (80, 3, 6)])
def test_shared_memory_is_what_the_host_expects(D, bits, ratio, per_channel):
    from kvq.kernels import static

    reason = nvrtc.unavailable() or static.unavailable()
    if reason:
        pytest.skip(reason)
    key, value = (bits, 32, per_channel, True), (bits, 16, False, True)
    c = constants_of(Case(D=D, key=key, value=value), RATIO=ratio)
    facts = static.facts(nvrtc.compile_cubin(SOURCES["v3"], c))["decode_v3"]
    assert facts.shared == tile.shared_bytes(SimpleNamespace(**c), c["WARPS"])
    assert facts.shared <= tile.MOST_SHARED
    assert facts.spills == 0
