r"""The layout that integer dot products read: blocks of 64 tokens, planes of codes.

A word is four bytes; with p = 8 / bits codes in a byte it holds 4 p codes. A register
is 16 neighbouring words.

    keys     word (j, t):  byte b, plane c  ->  token t, channel 4 p j + 4 c + b
    values   word (j, d):  byte b, plane c  ->  channel d, token 4 p j + 4 c + b

So one multiply-add of a register sums over four channels of 16 tokens (keys), or over
four tokens of 16 channels (values). Words j lie apart, tokens (channels) side by side.
Keys per channel come in pieces of at most 64 tokens that share their scales; values in
pieces of at most 64 channels. Codes of 8 bits of the values are stored as signed bytes.
"""

import numpy as np

UNIT = 64  # tokens of a block
BITS = (8, 4, 2)


def key_piece(scheme):
    """Tokens of a piece of keys: those that share a scale, at most UNIT."""
    return min(scheme.group, UNIT) if scheme.per == "channel" else UNIT


def value_piece(scheme, D):
    """Channels of a piece of values."""
    return 64 if D % 64 == 0 and (scheme.group is None or scheme.group >= 64) else 32


def pack_keys(codes, bits, piece):
    """codes uint8 (N, T, D) -> blocks uint8 (N, ceil(T / 64), 64 D bits / 8).

    D is a multiple of 32 / bits. The last block is filled up with zeros.
    """
    x, N, blocks, D, p = _whole_blocks(codes, bits)
    x = x.reshape(N, blocks, UNIT // piece, piece, D // (4 * p), p, 4)
    packed = _join(x.transpose(0, 1, 2, 4, 3, 5, 6), bits)
    return packed.reshape(N, blocks, UNIT * D // p)


def unpack_keys(blocks, bits, piece, T, D):
    """The inverse of `pack_keys`: codes uint8 (N, T, D)."""
    N, count, p = *blocks.shape[:2], 8 // bits
    x = _split(blocks.reshape(N, count, UNIT // piece, D // (4 * p), piece, 4), bits)
    return x.transpose(0, 1, 2, 4, 3, 5, 6).reshape(N, count * UNIT, D)[:, :T]


def pack_values(codes, bits, piece):
    """codes uint8 (N, T, D) -> blocks, likewise; D is a multiple of `piece`."""
    x, N, blocks, D, p = _whole_blocks(codes, bits)
    x = x ^ np.uint8(128) if bits == 8 else x
    x = x.reshape(N, blocks, UNIT // (4 * p), p, 4, D // piece, piece)
    packed = _join(x.transpose(0, 1, 5, 2, 6, 3, 4), bits)
    return packed.reshape(N, blocks, UNIT * D // p)


def unpack_values(blocks, bits, piece, T, D):
    """The inverse of `pack_values`."""
    N, count, p = *blocks.shape[:2], 8 // bits
    x = _split(blocks.reshape(N, count, D // piece, UNIT // (4 * p), piece, 4), bits)
    x = x.transpose(0, 1, 3, 5, 6, 2, 4).reshape(N, count * UNIT, D)[:, :T]
    return x ^ np.uint8(128) if bits == 8 else x


def _whole_blocks(codes, bits):
    N, T, D = codes.shape
    blocks = -(-T // UNIT)
    x = np.pad(codes, ((0, 0), (0, blocks * UNIT - T), (0, 0)))
    return x, N, blocks, D, 8 // bits


def _join(x, bits):
    """Planes (..., p, 4) of codes -> bytes (..., 4)."""
    out = np.zeros((*x.shape[:-2], 4), np.uint8)
    for c in range(x.shape[-2]):
        out |= x[..., c, :] << np.uint8(bits * c)
    return out


def _split(x, bits):
    """Bytes (..., 4) -> planes (..., p, 4) of codes."""
    planes = [x >> np.uint8(bits * c) & np.uint8(2**bits - 1) for c in range(8 // bits)]
    return np.stack(planes, axis=-2)
