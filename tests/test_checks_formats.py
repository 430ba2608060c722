"""Checks of the lessons on planning a deployment and on the systems' formats."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks
from kvq.formats import find_format
from kvq.formats.minifloat import swizzle_scales
from kvq.packing import pack


# --- right answers --------------------------------------------------------------------
def tokens_held(T, growing, sliding, W):
    return growing * T + sliding * min(T, W)


def users_sharing(free, c, P, o):
    return max(free - P * c, 0) // (o * c)


def step_speedup(W, C, r):
    return (W + C) / (W + C / r)


def read_q4_0(block):
    return find_format("ggml:q4_0").decode(block, (32,))


def halves(packed):
    return np.concatenate([packed & 15, packed >> 4])


def repack(packed):
    return pack(halves(packed), 4)


def open_word(word):
    z = word & 15
    return (word ^ z).view(np.float32), z


def scale_offset(t, s, S):
    T = int(np.max(t)) // 4 * 4 + 4
    place = np.argsort(swizzle_scales(np.arange(T * S).reshape(T, S)).ravel())
    return place[t * S + s]


RIGHT = {
    checks.check_tokens_held: tokens_held,
    checks.check_users_sharing: users_sharing,
    checks.check_step_speedup: step_speedup,
    checks.check_binding_bits: lambda c, B, J: 8 * c * B / J,
    checks.check_read_q4_0: read_q4_0,
    checks.check_repack: repack,
    checks.check_open_word: open_word,
    checks.check_scale_offset: scale_offset,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def q4_0_parts(block):
    d = np.frombuffer(block[:2], "<f2").astype(np.float32)
    return d, np.frombuffer(block[2:], np.uint8)


def q4_0_in_pairs(block):
    d, packed = q4_0_parts(block)
    return d * (np.stack([packed & 15, packed >> 4], axis=1).ravel() - np.float32(8))


def q4_0_high_first(block):
    return np.roll(read_q4_0(block), 16)


def q4_0_without_offset(block):
    d, packed = q4_0_parts(block)
    return d * halves(packed)


def q4_0_without_scale(block):
    return halves(q4_0_parts(block)[1]) - 8.0


def q4_0_wraps_around(block):
    d, packed = q4_0_parts(block)
    return d * (halves(packed) - np.uint8(8))


def q4_0_big_endian(block):
    codes = halves(q4_0_parts(block)[1]).astype(float)
    return float(np.frombuffer(block[:2], ">f2")[0]) * (codes - 8)


def repack_high_first(packed):
    codes = halves(packed)
    return codes[1::2] | codes[0::2] << 4


WRONG = [
    (checks.check_tokens_held, lambda T, g, s, W: g * T, "not counted"),
    (checks.check_tokens_held, lambda T, g, s, W: (g + s) * T, "no more than W"),
    (checks.check_tokens_held, lambda T, g, s, W: g * T + s * W, "before the window"),
    (checks.check_tokens_held, lambda T, g, s, W: (g + s) * min(T, W), "hold all T"),
    (checks.check_users_sharing, lambda m, c, P, o: m // (o * c), "takes room"),
    (checks.check_users_sharing, lambda m, c, P, o: m // ((P + o) * c), "stored once"),
    (checks.check_users_sharing, lambda m, c, P, o: (m - P * c) / o / c, "round down"),
    (checks.check_users_sharing, lambda m, c, P, o: (m - P * c) // (o * c), "0 users"),
    (checks.check_users_sharing, lambda m, c, P, o: (m - P) // o, "are tokens"),
    (checks.check_step_speedup, lambda W, C, r: r, "are read as well"),
    (checks.check_step_speedup, lambda W, C, r: (W + C / r) / (W + C), "upside down"),
    (checks.check_step_speedup, lambda W, C, r: (W + C) / W, "does not vanish"),
    (checks.check_step_speedup, lambda W, C, r: W + C / r, "not the ratio"),
    (checks.check_binding_bits, lambda c, B, J: c * B / J, "a byte has 8 bits"),
    (checks.check_binding_bits, lambda c, B, J: J / (8 * c * B), "solve for b"),
    (checks.check_binding_bits, lambda c, B, J: 8 * c * J / B, "belongs on top"),
    (checks.check_binding_bits, lambda c, B, J: 8 * B / J, "per number are missing"),
    (checks.check_read_q4_0, q4_0_in_pairs, "not 2j and 2j"),
    (checks.check_read_q4_0, q4_0_high_first, "are swapped"),
    (checks.check_read_q4_0, q4_0_without_offset, "must be subtracted"),
    (checks.check_read_q4_0, q4_0_without_scale, "multiply by d"),
    (checks.check_read_q4_0, q4_0_wraps_around, "wrap around"),
    (checks.check_read_q4_0, q4_0_big_endian, "little-endian"),
    (checks.check_repack, lambda packed: packed, "nothing changed"),
    (checks.check_repack, repack_high_first, "in the low half"),
    (checks.check_repack, lambda p: halves(p)[::2] | halves(p)[1::2], "shift the odd"),
    (checks.check_open_word, lambda w: (w.view(np.float32), w & 15), "clear the low 4"),
    (checks.check_open_word, lambda w: (w ^ w & 15, w & 15), "read its bits"),
    (checks.check_open_word, lambda w: (w, w & 7), "keep 4 bits"),
    (checks.check_open_word, lambda w: (w, w >> 28), "in the low bits"),
    (checks.check_scale_offset, lambda t, s, S: t * S + s, "changes fastest"),
    (checks.check_scale_offset, lambda t, s, S: t * S + 4 * s + t % 4, "rounded down"),
    (
        checks.check_scale_offset,
        lambda t, s, S: t // 4 * S + 4 * s + t % 4,
        "have 4 S scales",
    ),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    assert_explained(check, wrong, cause)
