"""Where the bits of a token's codes are in its row of 32-bit words.

    canonical   the bytes of `kvq.packing.pack`: bit k of code i is bit b*i + k
    paired      two neighbouring codes 16 bits apart, for 2, 3, 4 and 8 bits

A layout is a permutation: `bit_positions` says where each bit of each code goes, and
everything else follows. A row is a whole number of words, padded with zero bits.

`paired` is made for kernels that turn codes into numbers two at a time, one in each
half of a register. A word of n = 32 / b codes holds code 2p + h at bit 16*h + b*p:

    4 bits    bits 0-3: code 0   4-7: code 2   ...   16-19: code 1   20-23: code 3   ...

3 does not divide 32. So 32 codes are three words: the 2 low bits of codes 0-15, those
of codes 16-31, and the high bits of all 32, each a paired word of 2-bit or 1-bit codes.
"""

import numpy as np

LAYOUTS = ("canonical", "paired")
PAIRED_BITS = (2, 3, 4, 8)


def row_words(D, bits, layout="canonical"):
    """32-bit words of one token's row of D codes. Raises ValueError."""
    _check(bits, layout)
    if layout == "paired" and bits == 3:
        return 3 * -(-D // 32)
    return -(-D * bits // 32)


def bit_positions(D, bits, layout="canonical"):
    """Where bit k of code i is in a row: int (D, bits), all different.

    Bit p of a row is bit p % 32 (counted from the least significant) of word p // 32.
    Raises ValueError for an unknown layout, or bits that it does not have.
    """
    _check(bits, layout)
    i, k = np.arange(D)[:, None], np.arange(bits)
    if layout == "canonical":
        return bits * i + k
    if bits != 3:
        return _paired(i, bits) + k
    unit = 96 * (i // 32)
    low, high = _paired(i % 32, 2) + k, 64 + _paired(i % 32, 1)
    return unit + np.where(k < 2, low, high)


def _paired(i, bits):
    """The lowest bit of code i = n*word + 2*p + h, n = 32 / bits."""
    word, e = np.divmod(i, 32 // bits)
    p, h = np.divmod(e, 2)
    return 32 * word + 16 * h + bits * p


def to_words(codes, bits, layout="canonical"):
    """codes (..., D) uint8, each < 2^bits -> words (..., W) uint32, W = `row_words`.

    Raises TypeError for another dtype, ValueError for a code that does not fit.
    """
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"codes have dtype {codes.dtype}; expected uint8")
    D = codes.shape[-1]
    where = bit_positions(D, bits, layout)
    if codes.size and codes.max() >> bits:
        raise ValueError(f"code {codes.max()} does not fit in {bits} bits")
    W = row_words(D, bits, layout)
    row = np.zeros((*codes.shape[:-1], 32 * W), np.uint8)
    for k in range(bits):
        row[..., where[:, k]] = codes >> k & 1
    packed = np.packbits(row, axis=-1, bitorder="little")
    return packed.view("<u4").astype(np.uint32, copy=False)


def from_words(words, bits, D, layout="canonical"):
    """The inverse of `to_words`: words (..., W) uint32 -> codes (..., D) uint8.

    Raises TypeError for another dtype, ValueError if W does not match.
    """
    words = np.asarray(words)
    if words.dtype != np.uint32:
        raise TypeError(f"words have dtype {words.dtype}; expected uint32")
    where = bit_positions(D, bits, layout)
    W = row_words(D, bits, layout)
    if words.shape[-1:] != (W,):
        raise ValueError(
            f"{D} codes of {bits} bits are {W} words ({layout}), "
            f"but the words have shape {words.shape}"
        )
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    row = np.unpackbits(packed, axis=-1, bitorder="little")
    codes = np.zeros((*words.shape[:-1], D), np.uint8)
    for k in range(bits):
        codes |= row[..., where[:, k]] << k
    return codes


def _check(bits, layout):
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; valid: {', '.join(LAYOUTS)}")
    valid = PAIRED_BITS if layout == "paired" else tuple(range(1, 9))
    if bits not in valid:
        raise ValueError(
            f"bits={bits!r} in the {layout} layout; valid: {', '.join(map(str, valid))}"
        )
