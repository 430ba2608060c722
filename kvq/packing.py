r"""Codes <-> bytes for 1 to 8 bits. The bit order is defined here, nowhere else.

Code i of a row occupies bits b*i .. b*i + b-1 of that row's bit string, where bit
k of the string is bit k mod 8 (counted from the least significant) of byte k // 8:

    bit string of row = sum_i code_i * 2^(b*i)      (little-endian)

Every row is padded with zero bits to whole bytes: ceil(n*b / 8) bytes for n codes.
So two 4-bit codes are `lo | hi << 4`, and eight 3-bit codes are 24 bits.
"""

import math

import numpy as np


def _check_bits(bits):
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ValueError(f"bits={bits!r}; valid: 1, 2, 3, 4, 5, 6, 7, 8")


def _unit(bits):
    """(codes, bytes) of the smallest run of codes that fills whole bytes."""
    codes = 8 // math.gcd(8, bits)
    return codes, codes * bits // 8


def pack(codes, bits, axis=-1):
    """Pack unsigned codes (uint8, each < 2^bits) along `axis`.

    codes : uint8 (..., n, ...). `axis=-1` packs along the channels of a token,
        `axis=-2` along the tokens of a channel.
    Returns uint8 (..., ceil(n * bits / 8), ...).
    Raises TypeError for another dtype, ValueError for a code that does not fit.
    """
    _check_bits(bits)
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"codes have dtype {codes.dtype}; expected uint8")
    if codes.size and codes.max() >> bits:
        raise ValueError(f"code {codes.max()} does not fit in {bits} bits")
    codes = np.moveaxis(codes, axis, -1)
    n = codes.shape[-1]
    per_unit, unit_bytes = _unit(bits)
    ragged = -n % per_unit
    if ragged:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, ragged)])
    count = codes.shape[-1] // per_unit
    units = codes.reshape(*codes.shape[:-1], count, per_unit)
    packed = np.zeros((*units.shape[:-1], unit_bytes), np.uint8)
    for i in range(per_unit):
        byte, shift = divmod(i * bits, 8)
        packed[..., byte] |= units[..., i] << shift
        if shift + bits > 8:  # the code straddles two bytes
            packed[..., byte + 1] |= units[..., i] >> (8 - shift)
    packed = packed.reshape(*codes.shape[:-1], count * unit_bytes)
    packed = packed[..., : math.ceil(n * bits / 8)]
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def unpack(packed, bits, n, axis=-1):
    """The first `n` codes of each packed row: the inverse of `pack`.

    packed : uint8 with ceil(n * bits / 8) bytes along `axis`.
    Returns uint8 codes with `n` entries along `axis`.
    Raises TypeError for another dtype, ValueError if the length does not match.
    """
    _check_bits(bits)
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed codes have dtype {packed.dtype}; expected uint8")
    packed = np.moveaxis(packed, axis, -1)
    if packed.shape[-1] != math.ceil(n * bits / 8):
        raise ValueError(
            f"{n} codes of {bits} bits are {math.ceil(n * bits / 8)} bytes, "
            f"not {packed.shape[-1]}"
        )
    per_unit, unit_bytes = _unit(bits)
    ragged = -packed.shape[-1] % unit_bytes
    if ragged:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, ragged)])
    count = packed.shape[-1] // unit_bytes
    units = packed.reshape(*packed.shape[:-1], count, unit_bytes)
    codes = np.empty((*units.shape[:-1], per_unit), np.uint8)
    for i in range(per_unit):
        byte, shift = divmod(i * bits, 8)
        code = units[..., byte] >> shift
        if shift + bits > 8:
            code = code | units[..., byte + 1] << (8 - shift)
        codes[..., i] = code & (2**bits - 1)
    codes = codes.reshape(*packed.shape[:-1], count * per_unit)[..., :n]
    return np.ascontiguousarray(np.moveaxis(codes, -1, axis))
