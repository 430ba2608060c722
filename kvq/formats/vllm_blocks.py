"""Where vLLM's slots lie in memory, and by which hash a full block is found again.

The logical cache is [L, B, H, N, C]: layers, blocks, KV heads, slots of a block,
content of a slot. A physical order names the same axes from the outermost in.

A block's hash covers its parent's hash, so that equal hashes mean equal prefixes:

    hash_i = sha256(encode(hash_{i-1}, tokens_i, extra_i))

The salt of a request is an extra key of its first block and thereby isolates every
later one. With `sha256_cbor` the hashes equal vLLM's, whoever computes them. With
`sha256`, vLLM's default, they equal vLLM's where both Pythons pickle alike (highest
protocol 5). xxhash is not offered (vLLM seeds it at random), nor are the keys of
prompt embeddings.

Source: vllm/v1/core/kv_cache_utils.py, vllm/utils/hashing.py, RFC #42082.
"""

import hashlib
import pickle
import struct

import numpy as np

LOGICAL = "LBHNC"
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}
# What the first block's hash takes for its parent's, before it is hashed.
SEED = "vllm-none-hash"


# --- physical orders ------------------------------------------------------------------
def axes(order):
    """The axes of `order` (a name of `ORDERS` or `ALIASES`) in the logical cache.

    Raises ValueError for another order.
    """
    order = ALIASES.get(order, order)
    if order not in ORDERS:
        valid = ", ".join((*ORDERS, *ALIASES))
        raise ValueError(f"order={order!r}; valid: {valid}")
    return [LOGICAL.index(axis) for axis in order]


def to_physical(cache, order):
    """A logical cache [L, B, H, N, C] as it lies in memory, contiguous."""
    return np.ascontiguousarray(np.transpose(cache, axes(order)))


def from_physical(cache, order):
    """The logical view [L, B, H, N, C] of a physical cache: shares its memory."""
    return np.transpose(cache, np.argsort(axes(order)))


def slots_to_blocks(slots, block_size):
    """Slots (H, T, C) of one sequence -> its blocks (B, H, N, C), zeros at the end."""
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"block_size={block_size!r}; valid: integers >= 1")
    H, T, C = slots.shape
    slots = np.pad(slots, [(0, 0), (0, -T % block_size), (0, 0)])
    return slots.reshape(H, -1, block_size, C).swapaxes(0, 1)


def blocks_to_slots(blocks, tokens):
    """The first `tokens` slots (H, T, C) of blocks (B, H, N, C)."""
    B, H, N, C = blocks.shape
    return blocks.swapaxes(0, 1).reshape(H, B * N, C)[:, :tokens]


# --- layouts of earlier versions ------------------------------------------------------
def flash_attention_cache(k, v):
    """[2, B, N, H, D] from k and v (B, H, N, D): FlashAttention's cache."""
    return np.stack([k, v]).swapaxes(2, 3)


def paged_attention_keys(k):
    """[B, H, D/x, N, x] from k (B, H, N, D): x numbers of a key are 16 bytes.

    Raises ValueError if D is no multiple of x.
    """
    B, H, N, D = k.shape
    x = 16 // k.itemsize
    if D % x:
        raise ValueError(f"D={D}; valid: multiples of {x} for {k.dtype}")
    return k.reshape(B, H, N, D // x, x).swapaxes(2, 3)


def paged_attention_values(v):
    """[B, H, D, N] from v (B, H, N, D)."""
    return v.swapaxes(2, 3)


# --- the hash chain -------------------------------------------------------------------
def block_hashes(
    tokens, block_size, salt=None, extra=None, algorithm="sha256", seed=SEED
):
    """The hash of every full block of a sequence: a list of 32 bytes each.

    tokens : token ids. salt : the request's cache salt, or None.
    extra : function of a block's number giving the tuple of its other keys, in vLLM's
        order (LoRA name, then multimodal (id, offset in the block)), or None.
    algorithm : "sha256" (pickle) or "sha256_cbor". seed : PYTHONHASHSEED where set.
    Raises ValueError for another algorithm or block size.
    """
    if algorithm not in ENCODINGS:
        raise ValueError(f"algorithm={algorithm!r}; valid: {', '.join(ENCODINGS)}")
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"block_size={block_size!r}; valid: integers >= 1")
    encode = ENCODINGS[algorithm]
    tokens = tuple(int(t) for t in tokens)
    parent, hashes = _sha256(encode(seed)), []
    for i in range(len(tokens) // block_size):
        keys = extra(i) if extra else ()
        keys += (salt,) if salt and i == 0 else ()
        block = tokens[i * block_size : (i + 1) * block_size]
        parent = _sha256(encode((parent, block, keys or None)))
        hashes.append(parent)
    return hashes


def cbor(value):
    """Canonical CBOR (RFC 8949, section 4.2) of None, integers, bytes, text, sequences.

    Raises TypeError for another type.
    """
    if value is None:
        return b"\xf6"
    if isinstance(value, int) and not isinstance(value, bool):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(value, tuple | list):
        return _cbor_head(4, len(value)) + b"".join(map(cbor, value))
    raise TypeError(
        f"{type(value).__name__}; valid: None, int, bytes, str, tuple, list"
    )


def _cbor_head(kind, n):
    """Three bits of kind, then n in as few bytes as hold it."""
    if n < 24:
        return bytes([kind << 5 | n])
    for i, form in enumerate(("B", "H", "I", "Q")):
        if n < 256 ** struct.calcsize(form):
            return bytes([kind << 5 | 24 + i]) + struct.pack(f">{form}", n)
    raise ValueError(f"{n}; valid: integers below 2^64")


def _pickle(value):
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _sha256(data):
    return hashlib.sha256(data).digest()


ENCODINGS = {"sha256": _pickle, "sha256_cbor": cbor}
