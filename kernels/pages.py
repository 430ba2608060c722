"""A page: 64 tokens of one KV head, in the order in which tensor cores want them.

    [ key scales | key zeros | key codes | value codes | value scales | value zeros ]

`mma.m16n8k16` multiplies A, 16 x 16 numbers in the registers of a warp. Lane 4g + t
holds those of rows g, g + 8 and of columns 2t, 2t + 1, 2t + 8, 2t + 9: its fragment.

    keys      A = K     rows are tokens, columns are channels
    values    A = V^T   rows are channels, columns are tokens

A lane loads 16 bytes: 1, 2, 4 or 8 fragments of 16, 8, 4 or 2 bits. 32 lanes load 512
neighbouring bytes. So no number ever moves from one lane to another.

A page of keys per channel with 128 tokens in a group holds 128 tokens: the scales and
zeros of the keys once, then the four other parts for 64 tokens, then those for 64 more.
A page of full precision holds float16 or bfloat16 numbers and nothing else: keys and
values of 16 tokens, four times.

A `PageLayout` says where each code, scale and zero is. It is a permutation, like the
words of `layouts.py`: `to_pages` and `from_pages` lose nothing.
"""

import functools
from dataclasses import dataclass

import numpy as np

from kvq.dtypes import numpy_dtype
from kvq.kernels.host import first_invalid, invalid
from kvq.scheme import UNIFORM, Scheme

BITS = (16, 8, 4, 2)
HEAD_DIMS = (64, 128, 256)
CHANNEL_GROUPS = (32, 64, 128)  # tokens of a group of keys per channel
STEP = 64  # tokens of a page; more where a group of keys per channel is larger
EXACT_STEP = 16  # tokens of a step of a page of full precision
EXACT = ("float16", "bfloat16")
LANES = 32


def code_places(tokens, D, bits, values=False):
    """Where the codes of a page are: int (tokens, D), the lowest bit of each.

    tokens, D : multiples of 64.
    values : False for keys (rows of A are tokens), True for values (channels).
    Bit p is bit p % 32 of word p // 32.
    """
    token, channel = np.ogrid[:tokens, :D]
    row, column = (channel, token) if values else (token, channel)
    g, low = row % 8, row // 8 % 2  # low: is it row g or row g + 8?
    t, half, right = column % 8 // 2, column % 2, column // 8 % 2
    fragment = token // 16 * (D // 16) + channel // 16
    unit, j = np.divmod(fragment, 16 // bits)
    lane = 128 * (LANES * unit + 4 * g + t)
    if bits == 16:
        return lane + 32 * (2 * right + low) + 16 * half
    if bits == 8:
        return lane + 64 * j + 32 * right + 16 * low + 8 * half
    if bits == 4:
        return lane + 32 * j + 16 * half + 8 * right + 4 * low
    outer, inner = (low, right) if values else (right, low)
    k = 1 + outer + 2 * (j % 2)  # `fragments.cuh`: 1 + code / 4^k
    return lane + 32 * (j // 2) + 16 * half + (10 - 2 * k - 8 * inner) % 16


def vector_order(blocks):
    """The order of numbers that belong to the columns of A, 16 for each block.

    16 bytes of a lane are those of its columns of two blocks, as if the first block
    were in row g and the second in row g + 8: again a fragment. The 8 lanes with the
    same t read the same 16 bytes.
    """
    order = np.arange(16 * blocks).reshape(
        blocks // 2, 2, 2, 4, 2
    )  # pair b right t half
    return order.transpose(0, 3, 2, 1, 4).ravel()


def row_order(steps, columns):
    """The order of numbers (steps * 64 tokens, columns) that belong to the rows of A.

    16 bytes of a lane are the numbers of its 8 rows of a step.
    """
    order = np.arange(steps * STEP * columns).reshape(steps, 4, 2, 8, columns)
    return order.transpose(0, 4, 3, 1, 2).ravel()


@dataclass(frozen=True)
class PageLayout:
    """Pages of keys stored by `key` and of values stored by `value`, D channels.

    Raises ValueError for what no page can hold.
    """

    key: Scheme
    value: Scheme
    D: int

    def __post_init__(self):
        reason = unsupported(self.key, self.value, self.D)
        if reason:
            raise ValueError(reason)

    @property
    def tokens(self):
        """Tokens of a page."""
        return max(STEP, self.key.group) if self.key.per == "channel" else STEP

    @property
    def numbers(self):
        """Scales of the keys, and of the values, of a page; as many zeros, or none."""
        key = self.key.metadata_shape(1, self.tokens, self.D)
        value = self.value.metadata_shape(1, self.tokens, self.D)
        return key[1] * key[2], value[1] * value[2]

    @property
    def head(self):
        """Words of the keys' scales and zeros."""
        words = self.numbers[0] // 2
        return [words, words * self.key.has_zero]

    @property
    def step(self):
        """Words of a step: codes of keys, of values; scales and zeros of values."""
        tokens = self.tokens // self.steps
        codes = [tokens * self.D * s.bits // 32 for s in (self.key, self.value)]
        words = self.numbers[1] // (2 * self.steps)
        return [*codes, words, words * self.value.has_zero]

    @property
    def steps(self):
        return self.tokens // (EXACT_STEP if self.key.full_precision else STEP)

    @property
    def words(self):
        """32-bit words of a page, a multiple of 4."""
        return sum(self.head) + self.steps * sum(self.step)

    @property
    def orders(self):
        """How keys' and values' scales are ordered: positions in (tokens, columns)."""
        key, value = self.numbers
        if self.key.per == "channel":  # one row after the other
            rows = np.arange(key).reshape(-1, self.D)
            k = rows[:, vector_order(self.D // 16)].ravel()
        else:
            k = row_order(self.tokens // STEP, key // self.tokens)
        columns = value // self.tokens
        v = (
            np.arange(value)
            .reshape(self.tokens // 16, 16, columns)
            .swapaxes(1, 2)
            .ravel()
        )
        return k, v[vector_order(value // 16)]

    def to_pages(self, k, v):
        """k, v : (codes (..., T, D), scale, zero), the arrays of whole pages.

        codes are uint8, or the numbers of a scheme without codes, in its dtype; scale
        and zero are float16 (..., groups of T, groups of D), zero may be None.
        Returns uint32 (..., T / tokens, words). Raises ValueError for other shapes.
        """
        k, v = self._paged(k, 0), self._paged(v, 1)
        numbers = [
            [_halves(x[..., order]) for x in side[1:] if x is not None]
            for side, order in zip((k, v), self.orders, strict=True)
        ]
        parts = [self._words(k[0], 0), self._words(v[0], 1), *numbers[1]]
        lead = parts[0].shape[:-1]
        steps = [x.reshape(*lead, self.steps, x.shape[-1] // self.steps) for x in parts]
        body = np.concatenate(steps, axis=-1)
        body = body.reshape(*lead, self.steps * body.shape[-1])
        return np.concatenate([*numbers[0], body], axis=-1)

    def from_pages(self, pages):
        """The inverse of `to_pages`: (k, v), each (codes, scale, zero).

        Raises ValueError for another number of words.
        """
        pages = np.asarray(pages, np.uint32)
        if pages.ndim < 2 or pages.shape[-1] != self.words:
            raise ValueError(
                f"pages {pages.shape}; expected (..., pages, {self.words}) words"
            )
        *heads, body = np.split(pages, np.cumsum(self.head), axis=-1)
        body = body.reshape(*pages.shape[:-1], self.steps, sum(self.step))
        parts = np.split(body, np.cumsum(self.step)[:-1], axis=-1)
        k, v, *tails = (
            x.reshape(*pages.shape[:-1], self.steps * x.shape[-1]) for x in parts
        )
        return (
            (self._codes(k, 0), *(self._numbers(x, 0) for x in heads)),
            (self._codes(v, 1), *(self._numbers(x, 1) for x in tails)),
        )

    @property
    def constants(self):
        """What `page.cuh` is compiled for, but for E."""
        key, value, D = self.key, self.value, self.D
        return {
            "HEAD_DIM": D,
            "KEY_BITS": key.bits,
            "KEY_GROUP": key.group if key.per == "channel" else min(key.group or D, D),
            "KEY_PER_CHANNEL": int(key.per == "channel"),
            "KEY_ASYMMETRIC": int(key.has_zero),
            "VALUE_BITS": value.bits,
            "VALUE_GROUP": min(value.group or D, D),
            "VALUE_ASYMMETRIC": int(value.has_zero),
        }

    # --- codes ------------------------------------------------------------------------
    def _words(self, codes, side):
        bits = (self.key, self.value)[side].bits
        order = _field_order(self.tokens, self.D, bits, bool(side))
        codes = codes.view(np.uint16) if bits == 16 else codes
        *pages, tokens, D = codes.shape
        fields = codes.reshape(*pages, tokens * D)[..., order].astype(np.uint32)
        fields = fields.reshape(*pages, tokens * D * bits // 32, 32 // bits)
        return np.bitwise_or.reduce(fields << _shifts(bits), axis=-1)

    def _codes(self, words, side):
        scheme = (self.key, self.value)[side]
        bits = scheme.bits
        fields = words[..., None] >> _shifts(bits) & np.uint32(2**bits - 1)
        *lead, pages, _ = words.shape
        out = np.empty((*lead, pages, self.tokens * self.D), np.uint16)
        order = _field_order(self.tokens, self.D, bits, bool(side))
        out[..., order] = fields.reshape(out.shape)
        out = out.reshape(*lead, pages * self.tokens, self.D)
        exact = scheme.full_precision
        return out.view(numpy_dtype(scheme.levels)) if exact else out.astype(np.uint8)

    # --- scales and zeros -------------------------------------------------------------
    def _paged(self, arrays, side):
        """codes (..., pages, tokens, D), scale and zero (..., pages, numbers)."""
        codes, *numbers = arrays
        *lead, T, D = codes.shape
        if T % self.tokens or D != self.D:
            raise ValueError(
                f"codes {codes.shape}; expected (..., T, {self.D}), T a multiple of "
                f"{self.tokens}"
            )
        pages = T // self.tokens
        rows = [
            None if x is None else x.reshape(*lead, pages, self.numbers[side])
            for x in numbers
        ]
        return codes.reshape(*lead, pages, self.tokens, D), *rows

    def _numbers(self, words, side):
        if words.shape[-1] == 0:
            return None
        scheme = (self.key, self.value)[side]
        *lead, pages, _ = words.shape
        out = np.empty((*lead, pages, self.numbers[side]), np.float16)
        out[..., self.orders[side]] = np.ascontiguousarray(words).view(np.float16)
        _, rows, columns = scheme.metadata_shape(1, self.tokens, self.D)
        return out.reshape(*lead, pages * rows, columns)


def unsupported(key, value, D):
    """None, or why no page holds keys and values stored by these schemes.

    D : channels, or None for any of `HEAD_DIMS`.
    """
    if D not in (None, *HEAD_DIMS):
        return f"D={D}; valid: {', '.join(map(str, HEAD_DIMS))}"
    for name, scheme in (("key", key), ("value", value)):
        reason = _unsupported_side(scheme, D or HEAD_DIMS[-1], name)
        if reason:
            return f"{name}: {reason}"
    if key.full_precision != value.full_precision:
        return "keys or values alone in full precision; valid: both or neither"
    if key.full_precision and key.levels != value.levels:
        return f"keys {key.levels}, values {value.levels}; valid: the same for both"
    return None


def _unsupported_side(scheme, D, name):
    if reason := invalid("bits", scheme.bits, BITS):
        return reason
    if scheme.full_precision:
        return invalid("levels", scheme.levels, EXACT)
    limits = {
        "levels": UNIFORM,
        "transform": (None,),
        "scale_dtype": ("float16",),
        "per": ("token", "channel") if name == "key" else ("token",),
    }
    if scheme.per == "channel":
        limits["group"] = CHANNEL_GROUPS
    if reason := first_invalid(scheme, limits):
        return reason
    group = min(scheme.group or D, D)
    if scheme.per == "token" and (group % 16 or D % group):
        return f"group={scheme.group}; valid: a multiple of 16 that divides D={D}"
    return None


@functools.cache
def _field_order(tokens, D, bits, values):
    """Which code is in each field of the words, lowest bits first."""
    return np.argsort(code_places(tokens, D, bits, values), axis=None)


def _shifts(bits):
    """Where the fields of a word begin."""
    return np.arange(0, 32, bits, dtype=np.uint32)


def _halves(numbers):
    return np.ascontiguousarray(numbers, np.float16).view(np.uint32)
