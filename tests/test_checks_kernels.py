"""Checks of the lessons on kernels: bits in words, threads, memory."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks


# --- right answers --------------------------------------------------------------------
def as_number(words):
    return sum(int(word) << 32 * w for w, word in enumerate(words))


def read_code(words, i, b):
    return as_number(words) >> b * i & (1 << b) - 1


def write_word(codes, w, b):
    row = sum(int(code) << b * i for i, code in enumerate(codes))
    return row >> 32 * w & (1 << 32) - 1


def by_magic(codes):
    return (codes + np.uint16(0x6400)).view(np.float16) - np.float16(1024)


def paired_word(codes):
    low, high = codes[::2], codes[1::2]
    return sum(
        a << 4 * p | b << 16 + 4 * p
        for p, (a, b) in enumerate(zip(low, high, strict=True))
    )


def dequant_thread(i, code_of, scale, zero, y, N, T, D, gt, gc):
    if i < N * T * D:
        n, t, c = np.unravel_index(i, (N, T, D))
        groups = N, -(-T // gt), -(-D // gc)
        at = np.ravel_multi_index((n, t // gt, c // gc), groups)
        y[i] = scale[at] * code_of(i) + zero[at]


def sectors(addresses, width):
    ideal = -(-len(np.unique(addresses)) * width // 32)
    return len({a // 32 for a in addresses.tolist()}), ideal


def wavefronts(words):
    by_bank = [{w for w in words.tolist() if w % 32 == bank} for bank in range(32)]
    return max(map(len, by_bank))


def sectors_of_row(r, size):
    return len({byte // 32 for byte in range(r * size, (r + 1) * size)})


def softmax_step(m, l, S):  # noqa: E741
    new = np.maximum(m, S.max())
    return new, l * np.exp(m - new) + np.exp(S - new), np.exp(S - new)


def merge_splits(m, l, o):  # noqa: E741
    weight = np.exp(m - np.max(m))
    return weight @ o / (weight @ l)


def splits_for(T, groups, wanted, shortest):
    return max(min(-(-wanted // groups), T // shortest), 1)


def race(a, b):
    (warp, place, kind, passed), (warp2, place2, kind2, passed2) = a, b
    both_read = kind == kind2 == "read"
    return place == place2 and warp != warp2 and passed == passed2 and not both_read


RIGHT = {
    checks.check_race: race,
    checks.check_idle_threads: lambda n, b: [
        i for i in range(b) if i >= (n - 1) % b + 1
    ],
    checks.check_widest_load: lambda D: min(16, 2 * D & -2 * D),
    checks.check_mask_of: lambda n: int("1" * n, 2),
    checks.check_kv_head: lambda h, H_q, H_kv: h * H_kv // H_q,
    checks.check_times_read: lambda H_q, H_kv, per: H_q // H_kv if per[0] == "q" else 1,
    checks.check_merge_splits: merge_splits,
    checks.check_splits_for: splits_for,
    checks.check_shuffle_xor: lambda x, m: np.array([x[i ^ m] for i in range(32)]),
    checks.check_warp_sum: lambda x: np.full(32, np.sum(x)),
    checks.check_score_by_warp: lambda q, k: np.full(32, np.sum(q * k)),
    checks.check_softmax_step: softmax_step,
    checks.check_neutral: lambda: (0, float("-inf")),
    checks.check_sectors: sectors,
    checks.check_word_addresses: lambda j, b: 2 * (32 // b * np.arange(32) + j),
    checks.check_wavefronts: wavefronts,
    checks.check_sectors_of_row: sectors_of_row,
    checks.check_grid_of: lambda n, block: (-(-n // block), -n % block),
    checks.check_dequant_thread: dequant_thread,
    checks.check_longest_for_int32: lambda N, D: (1 << 31) // (N * D),
    checks.check_bytes_per_number: lambda b, G: b / 8 + 4 / G + 4,
    checks.check_read_code: read_code,
    checks.check_write_word: write_word,
    checks.check_by_magic: by_magic,
    checks.check_paired_word: paired_word,
    checks.check_join_planes: lambda low, high: low + 4 * high,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    assert_passes(check, RIGHT[check], capsys)


# --- wrong answers --------------------------------------------------------------------
def read_uncut(words, i, b):
    return words[b * i // 32] >> b * i % 32 & (1 << b) - 1


def read_unmasked(words, i, b):
    return words[b * i // 32] >> b * i % 32


def write_late(codes, w, b):
    """Leaves out the code that began in the word before."""
    own = [(i, c) for i, c in enumerate(codes) if 32 * w <= b * i < 32 * w + 32]
    return sum(c << b * i - 32 * w for i, c in own) & 0xFFFFFFFF


def write_long(codes, w, b):
    own = [(i, c) for i, c in enumerate(codes) if 32 * w <= b * i < 32 * w + 32]
    return sum(c << b * i - 32 * w for i, c in own)


def without_guard(i, *args):
    y, (N, T, D) = args[3], args[4:7]
    dequant_thread(i, *args) if i < N * T * D else y.__setitem__(i, 0)


def without_zero(i, code_of, scale, zero, y, *numbers):
    dequant_thread(i, code_of, scale, 0 * zero, y, *numbers)


def step_without_shrinking(m, l, S):  # noqa: E741
    new, _, p = softmax_step(m, l, S)
    return new, l + p, p


def step_that_forgets(m, l, S):  # noqa: E741
    return softmax_step(S.max(), l * np.exp(m - S.max()), S)


def step_summed(m, l, S):  # noqa: E741
    new, l, p = softmax_step(m, l, S)  # noqa: E741
    return new, l.sum(), p


WRONG = [
    (checks.check_race, lambda a, b: a[1] == b[1] and a[0] != b[0], "a barrier is"),
    (checks.check_race, lambda a, b: race(a, b) or a[1] != b[1], "another place"),
    (checks.check_race, lambda a, b: a[1] == b[1] and a[3] == b[3], "the same warp"),
    (
        checks.check_race,
        lambda a, b: a[1:2] + a[3:] == b[1:2] + b[3:] and a[0] != b[0],
        "two reads",
    ),
    (
        checks.check_idle_threads,
        lambda n, block: list(range(n % block, block)),
        "a full last block",
    ),
    (checks.check_widest_load, lambda D: min(16, D & -D), "2 bytes"),
    (checks.check_widest_load, lambda D: 16, "only the first row"),
    (checks.check_mask_of, lambda n: 2**n, "subtract 1"),
    (checks.check_kv_head, lambda h, H_q, H_kv: h % H_kv, "not modulo"),
    (checks.check_kv_head, lambda h, H_q, H_kv: h // H_kv, "by the ratio"),
    (checks.check_times_read, lambda H_q, H_kv, per: H_q, "of its group only"),
    (checks.check_merge_splits, lambda m, n, o: o.sum(0) / n.sum(), "weight each"),
    (
        checks.check_merge_splits,
        lambda m, n, o: np.exp(m - m.max()) @ o,
        "divide by l",
    ),
    (checks.check_splits_for, lambda T, g, wanted, n: -(-wanted // g), "no split"),
    (checks.check_splits_for, lambda T, g, wanted, n: max(1, T // n), "fill the GPU"),
    (
        checks.check_splits_for,
        lambda T, g, wanted, n: min(-(-wanted // g), T // n),
        "at least",
    ),
    (checks.check_shuffle_xor, lambda x, m: np.roll(x, -m), "not i [+] m"),
    (checks.check_shuffle_xor, lambda x, m: np.arange(32) ^ m, "return their x"),
    (checks.check_warp_sum, np.sum, "return 32 numbers"),
    (checks.check_score_by_warp, np.dot, "return 32 numbers"),
    (
        checks.check_score_by_warp,
        lambda q, k: (q * k).reshape(-1, 32).sum(axis=0),
        "use warp_sum",
    ),
    (checks.check_softmax_step, step_without_shrinking, "old l shrinks"),
    (checks.check_softmax_step, step_that_forgets, "never falls"),
    (checks.check_softmax_step, step_summed, "its own part"),
    (checks.check_neutral, lambda: (0, 0), "may be negative"),
    (checks.check_neutral, lambda: (1, -np.inf), "x [+] 0 = x"),
    (checks.check_sectors, lambda a, width: (32, sectors(a, width)[1]), "once"),
    (
        checks.check_sectors,
        lambda a, width: (sectors(a, width)[0], width),
        "several ask for",
    ),
    (
        checks.check_word_addresses,
        lambda j, b: 32 // b * np.arange(32) + j,
        "2 bytes",
    ),
    (checks.check_word_addresses, lambda j, b: 64 // b * np.arange(32), "further on"),
    (checks.check_wavefronts, lambda w: np.bincount(w % 32).max(), "share it"),
    (checks.check_wavefronts, lambda w: len(np.unique(w % 32)), "busiest"),
    (checks.check_sectors_of_row, lambda r, size: -(-size // 32), "in the middle"),
    (
        checks.check_sectors_of_row,
        lambda r, size: sectors_of_row(r, size) - 1,
        "add 1",
    ),
    (checks.check_grid_of, lambda n, b: (n // b, n // b * b - n), "round up"),
    (
        checks.check_grid_of,
        lambda n, b: (n // b + 1, (n // b + 1) * b - n),
        "no extra block",
    ),
    (checks.check_grid_of, lambda n, b: (-(-n // b), n % b), "idle are"),
    (checks.check_dequant_thread, without_guard, "must return first"),
    (checks.check_dequant_thread, without_zero, "add the zero"),
    (checks.check_longest_for_int32, lambda N, D: 2**31 // D, "the heads"),
    (checks.check_longest_for_int32, lambda N, D: 2**32 // (N * D), "has a sign"),
    (checks.check_longest_for_int32, lambda N, D: (2**31 - 1) // (N * D), "begins"),
    (checks.check_bytes_per_number, lambda b, G: b / 8 + 4 / G, "is written"),
    (checks.check_bytes_per_number, lambda b, G: b + 4 / G + 4, "b / 8 bytes"),
    (checks.check_read_code, read_uncut, "goes on in the low bits"),
    (checks.check_read_code, read_unmasked, "keep b bits"),
    (checks.check_write_word, write_late, "start one code earlier"),
    (checks.check_write_word, write_long, "cut off"),
    (
        checks.check_write_word,
        lambda codes, w, b: int(f"{write_word(codes, w, b):032b}"[::-1], 2),
        "lowest bits come first",
    ),
    (checks.check_by_magic, lambda codes: codes.astype(np.uint16), "use .view"),
    (
        checks.check_by_magic,
        lambda codes: by_magic(codes) + np.float16(1024),
        "subtract 1024",
    ),
    (checks.check_by_magic, lambda codes: codes.view(np.float16), "without an exp"),
    (
        checks.check_paired_word,
        lambda codes: write_word(codes, 0, 4),
        "canonical order",
    ),
    (
        checks.check_paired_word,
        lambda codes: paired_word(codes[4:] + codes[:4]),
        "none of the usual",
    ),
    (checks.check_join_planes, lambda low, high: low | high, "counts 4"),
    (checks.check_join_planes, lambda low, high: high | low << 1, "low bits come"),
    (checks.check_join_planes, lambda low, high: low | high << 3, "not by 3"),
]


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_wrong_answer_is_explained(check, answer, words):
    assert_explained(check, answer, words)
