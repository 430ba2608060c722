r"""The layout that `attend.py` reads: blocks of 128 tokens, panels of words, fields.

A word has 32 bits and holds 4 p codes, p = 8 / bits in each byte. A *panel* is a matrix
of words with 32 lanes, side by side, so that a loop along them is one vector operation
after the other. In the panels of a block, one after the other, are

    keys     32 tokens each.    word (j, t): byte b, plane c -> channel 4 p j + 4 c + b
    values   32 channels each.  word (j, d): byte b, plane c -> token   4 p j + 4 c + b

Byte b of plane c is the field of `bits` bits from bit 8 b + bits c. The four bytes of a
plane meet four bytes of a query (or of the weights) in one integer dot product; a sum
of numbers takes the fields one by one. Codes of 8 bits of the values are stored as
signed bytes, code - 128, which is what the dot product needs.

    Store         the words, scales and zeros of one stream, in arrays that grow
    Blocks        its first T tokens: the one chunk of a `Stream`
    BlockLayout   says so to the stream
"""

from dataclasses import dataclass
from functools import cached_property
from operator import is_

import numpy as np
from numba import njit

from kvq.kernels.cpu.codes import stored
from kvq.kernels.cpu.simd import LINE
from kvq.kernels.host import first_invalid, invalid
from kvq.quantizer import from_codes, integer_levels

UNIT, LANES = 128, 32  # tokens of a block; words in a row of a panel
BITS = (8, 4, 2)
GROWTH = 1.25  # so that a token is copied at most 5 times, however long the stream
SIGN = np.uint32(0x80808080)  # code ^ 128 in each byte is code - 128
LIMITS = {
    "bits": BITS,
    "levels": ("symmetric", "asymmetric"),
    "scale_dtype": ("float16",),
    "transform": (None,),
}
GROUPS = {"channel": (32, 64, 128), "token": (None, 32, 64, 128, 256)}
PER = {"key": ("token", "channel"), "value": ("token",)}


def unsupported(policy):
    """None, or why tokens stored by this policy cannot lie in blocks."""
    if policy.value is None:
        return "value=None (a latent cache); valid: a Scheme"
    for side, per in PER.items():
        scheme = getattr(policy, side)
        reason = first_invalid(scheme, {**LIMITS, "per": per})
        reason = reason or invalid("group", scheme.group, GROUPS[scheme.per])
        if reason:
            return f"{side}: {reason}"
    return None


def layouts(policy):
    """The BlockLayouts of keys and values. Raises ValueError for what `unsupported`
    names."""
    if reason := unsupported(policy):
        raise ValueError(f"layout 'blocks' does not support {reason}")
    return [BlockLayout(side) for side in PER]


# --- the layout, as a bijection -------------------------------------------------------
def key_words(codes, bits):
    """codes uint8 (H, T, D) -> words uint32 (H, ceil(T / 128), 4 D bits).

    D is a multiple of 32. The last block is filled up with zeros.
    """
    x = _whole_blocks(codes)
    H, blocks, _, D = x.shape
    panels = x.reshape(H, blocks, UNIT // LANES, LANES, D).swapaxes(-1, -2)
    return _join(panels, bits).reshape(H, blocks, 4 * D * bits)


def value_words(codes, bits):
    """codes uint8 (H, T, D) -> words, likewise."""
    x = _whole_blocks(codes)
    H, blocks, _, D = x.shape
    panels = x.reshape(H, blocks, UNIT, D // LANES, LANES).swapaxes(-2, -3)
    words = _join(panels, bits).reshape(H, blocks, 4 * D * bits)
    return words ^ SIGN if bits == 8 else words


def key_codes(words, bits, D):
    """The inverse of `key_words`: codes uint8 (H, 128 blocks, D)."""
    H, blocks, _ = words.shape
    panels = _split(words.reshape(H, blocks, UNIT // LANES, -1, LANES), bits)
    return panels.swapaxes(-1, -2).reshape(H, blocks * UNIT, D)


def value_codes(words, bits, D):
    """The inverse of `value_words`."""
    H, blocks, _ = words.shape
    words = words ^ SIGN if bits == 8 else words
    panels = _split(words.reshape(H, blocks, D // LANES, -1, LANES), bits)
    return panels.swapaxes(-2, -3).reshape(H, blocks * UNIT, D)


def _whole_blocks(codes):
    H, T, D = codes.shape
    blocks = -(-T // UNIT)
    x = np.pad(codes, ((0, 0), (0, blocks * UNIT - T), (0, 0)))
    return x.reshape(H, blocks, UNIT, D)


def _shifts(bits):
    """Of the 4 p fields of a word, in the order of the rows that they come from."""
    return [8 * b + bits * c for c in range(8 // bits) for b in range(4)]


def _join(x, bits):
    """Rows (..., rows, lanes) of codes -> (..., rows / 4 p, lanes) of words."""
    *lead, rows, lanes = x.shape
    shifts = _shifts(bits)
    x = x.reshape(*lead, rows // len(shifts), len(shifts), lanes)
    words = np.zeros((*lead, rows // len(shifts), lanes), np.uint32)
    for i, shift in enumerate(shifts):
        words |= x[..., i, :].astype(np.uint32) << np.uint32(shift)
    return words


def _split(words, bits):
    """The inverse of `_join`: uint8 codes."""
    *lead, rows, lanes = words.shape
    mask = np.uint32(2**bits - 1)
    fields = [words >> np.uint32(shift) & mask for shift in _shifts(bits)]
    x = np.stack(fields, axis=-2).astype(np.uint8)
    return x.reshape(*lead, rows * len(fields), lanes)


# --- the same, token by token ---------------------------------------------------------
@njit(cache=True)
def write_keys(codes, bits, start, words):
    """Put codes (H, t, D) into words (H, blocks, 4 D bits) from token `start` on."""
    H, T, D = codes.shape
    fields = 32 // bits
    for h in range(H):
        for i in range(T):
            block, lane = divmod(start + i, 128)
            at = lane // 32 * (D // fields) * 32 + lane % 32
            for j in range(D // fields):
                word = np.uint32(0)
                for r in range(fields):
                    shift = np.uint32(8 * (r % 4) + bits * (r // 4))
                    word |= np.uint32(codes[h, i, j * fields + r]) << shift
                words[h, block, at + j * 32] = word


@njit(cache=True)
def write_values(codes, bits, start, words):
    """The same for values: a token is one field of the words of a row of each panel."""
    H, T, D = codes.shape
    fields = 32 // bits
    flip = np.uint8(128 if bits == 8 else 0)
    for i in range(T):
        block, t = divmod(start + i, 128)
        j, r = divmod(t, fields)
        shift = np.uint32(8 * (r % 4) + bits * (r // 4))
        others = ~(np.uint32((1 << bits) - 1) << shift)
        for h in range(H):
            for d in range(D):
                at = (d // 32 * (128 // fields) + j) * 32 + d % 32
                code = np.uint32(codes[h, i, d] ^ flip) << shift
                words[h, block, at] = words[h, block, at] & others | code


SIDES = {"key": (write_keys, key_codes), "value": (write_values, value_codes)}


# --- streams of tokens ----------------------------------------------------------------
class Store:
    """Words, scales and zeros of one stream in arrays with room to grow.

    words : uint32 (H, blocks, 4 D bits). scale, zero : (H, groups of tokens, groups of
    channels); where the scheme has no zeros, zero is one number that nobody reads.
    """

    def __init__(self, scheme, H, D, side):
        self.scheme, self.D, self.side, self.tokens = scheme, D, side, 0
        self.words = np.zeros((H, 0, 4 * D * scheme.bits), np.uint32)
        columns = scheme.metadata_shape(H, 1, D)[2]
        dtype = np.dtype(scheme.scale_dtype)
        self.scale = np.zeros((H, 0, columns), dtype)
        self.zero = np.zeros((H, 0, columns) if scheme.has_zero else (1, 1, 1), dtype)
        self.place = self._place()

    def append(self, codes, scale, zero):
        """Add codes (H, t, D) and their metadata, behind whole groups of tokens."""
        start, self.tokens = self.tokens, self.tokens + codes.shape[1]
        H, _, D = codes.shape
        first, last = (
            self.scheme.metadata_shape(H, t, D)[1] for t in (start, self.tokens)
        )
        self.words = _grown(self.words, -(-self.tokens // UNIT))
        self.scale = _grown(self.scale, last)
        self.zero = self.zero if zero is None else _grown(self.zero, last)
        arrays = self.words, self.scale, self.zero
        if not all(map(is_, arrays, self.place[1])):  # one has grown
            self.place = self._place()
        write, _ = SIDES[self.side]
        write(codes, self.scheme.bits, start, self.words)
        self.scale[:, first:last] = scale
        if zero is not None:
            self.zero[:, first:last] = zero

    def _place(self):
        """For compiled code, the fields of an `attend.Side`, and the arrays that they
        tell the addresses of."""
        scheme, D = self.scheme, self.D
        per_channel = scheme.per == "channel"
        arrays = self.words, self.scale, self.zero
        fields = np.array(
            [
                *(n for a in arrays for n in (a.ctypes.data, a.shape[1])),
                scheme.bits,
                scheme.group if per_channel else min(scheme.group or D, D),
                per_channel,
                scheme.has_zero,
                integer_levels(scheme)[2],
            ],
            np.int64,
        )
        return fields, arrays

    def codes(self, start, stop):
        """uint8 (H, stop - start, D)."""
        first, last = start // UNIT, -(-stop // UNIT)
        _, read = SIDES[self.side]
        codes = read(self.words[:, first:last], self.scheme.bits, self.D)
        return codes[:, start - first * UNIT : stop - first * UNIT]


def _grown(array, n):
    """The array with room for n along axis 1."""
    if n <= array.shape[1]:
        return array
    H, old, columns = array.shape
    shape = H, max(n, int(old * GROWTH) + 1), columns
    out = _at_a_line(shape, array.dtype)
    out[:, :old] = array
    return out


def _at_a_line(shape, dtype):
    """An empty array that begins where a line of memory does: a vector that lies in two
    lines is two loads."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + nbytes].view(dtype).reshape(shape)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The first `tokens` tokens of a Store, with what a `Stream` asks of a chunk.

    Streams are values: two may share a Store. The one that appends first goes on in
    it, the other one takes its tokens to a Store of its own.
    """

    store: Store
    tokens: int

    @property
    def scheme(self):
        """The Scheme of the tokens."""
        return self.store.scheme

    @property
    def shape(self):
        """(H, T, D)"""
        return len(self.store.words), self.tokens, self.store.D

    @cached_property
    def arrays(self):
        """Every array that is stored, without the room to grow."""
        words = self.store.words[:, : -(-self.tokens // UNIT)]
        return [a for a in (words, self.scale, self.zero) if a is not None]

    @property
    def nbytes(self):
        """Bytes of everything that is stored; the last block counts whole."""
        return sum(a.nbytes for a in self.arrays)

    @cached_property
    def scale(self):
        """(H, groups of tokens, groups of channels), as in a QuantizedTensor."""
        return self.store.scale[:, : self.scheme.metadata_shape(*self.shape)[1]]

    @cached_property
    def zero(self):
        """Likewise, or None."""
        if not self.scheme.has_zero:
            return None
        return self.store.zero[:, : self.scheme.metadata_shape(*self.shape)[1]]

    def unpack(self, start=0, stop=None):
        """Codes of the tokens start..stop-1: uint8 (H, stop - start, D)."""
        start, stop, _ = slice(start, stop).indices(self.tokens)
        return self.store.codes(start, stop)

    def dequantize(self, start=0, stop=None):
        """x_hat of the tokens start..stop-1: float32 (H, stop - start, D)."""
        start, stop, _ = slice(start, stop).indices(self.tokens)
        codes = self.unpack(start, stop)
        return from_codes(codes, self.scale, self.zero, self.scheme, start)

    def crop(self, tokens):
        """The first `tokens` tokens, whole groups."""
        return Blocks(self.store, tokens)

    def append(self, x):
        """With the tokens x (H, t, D), quantized."""
        codes, scale, zero = stored(x, self.scheme, bits=8)
        store = self.store if self.store.tokens == self.tokens else self._copy()
        store.append(codes, scale, zero)
        return Blocks(store, store.tokens)

    def _copy(self):
        store = Store(self.scheme, self.shape[0], self.shape[2], self.store.side)
        store.append(self.unpack(), self.scale, self.zero)
        return store


class BlockLayout:
    """The `layout` of a Stream whose quantized tokens lie in Blocks of one side."""

    def __init__(self, side):
        self.side = side

    def check_head_dim(self, D):
        """Raise ValueError for rows that do not fill whole words and registers."""
        if D % 32:
            raise ValueError(f"layout 'blocks' with D={D}; valid: multiples of 32")

    def append(self, chunks, x, scheme):
        """The one chunk with the tokens x (H, t, D), quantized, behind it."""
        return ((chunks or (self.empty(scheme, *x.shape),))[0].append(x),)

    def convert(self, chunks):
        """Chunks of any layout, in this one."""
        if not chunks:
            return ()
        store = self.empty(chunks[0].scheme, *chunks[0].shape).store
        for chunk in chunks:
            store.append(chunk.unpack(), chunk.scale, chunk.zero)
        return (Blocks(store, store.tokens),)

    def empty(self, scheme, H, _, D):
        """No tokens."""
        return Blocks(Store(scheme, H, D, self.side), 0)
