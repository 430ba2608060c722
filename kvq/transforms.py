r"""Changes of basis around a quantizer: RoPE, Hadamard rotation, signs, smoothing.

A rotation keeps every score, (H q) . (H k) = q . k, and spreads an outlier over all
channels. A shift of all keys by one vector moves every logit of a query by the same
amount, which softmax ignores.
"""

from functools import lru_cache

import numpy as np


def rope(x, positions, base=10000.0, inverse=False):
    r"""Rotary position embedding, half-split pairs (i, i + D/2).

        theta_i = p * base^(-2i/D)
        [x_i, x_(i+D/2)] -> [x_i cos - x_(i+D/2) sin, x_i sin + x_(i+D/2) cos]

    x : (..., T, D), D even. positions : T token positions.
    inverse : rotate back. Returns float64 (..., T, D).
    Source: RoFormer (arXiv 2104.09864), pairs as in GPT-NeoX and Llama of Hugging
    Face. Raises ValueError for odd D.
    """
    x = np.asarray(x, dtype=np.float64)
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"RoPE rotates pairs of channels; D={D} is odd")
    theta = np.multiply.outer(
        np.asarray(positions, dtype=np.float64), base ** (-np.arange(0, D, 2) / D)
    )
    cos, sin = np.cos(theta), np.sin(theta) * (-1 if inverse else 1)
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate(
        [first * cos - second * sin, first * sin + second * cos], axis=-1
    )


def hadamard_matrix(D):
    r"""H_ij = (-1)^popcount(i & j) / sqrt(D): orthonormal and its own inverse.

    Natural (Sylvester) order, as llama.cpp rotates its cache. Float64 (D, D).
    Raises ValueError unless D is a power of two.
    """
    _check_power_of_two(D)
    H = np.ones((1, 1))
    while len(H) < D:
        H = np.block([[H, H], [H, -H]])
    return H / np.sqrt(D)


def hadamard(x):
    """x H along the last axis by log2(D) butterflies, in float32.

    x : (..., D), D a power of two. Applying it twice gives x back.
    """
    x = np.array(x, dtype=np.float32)
    D = x.shape[-1]
    _check_power_of_two(D)
    step = 1
    while step < D:
        pairs = x.reshape(*x.shape[:-1], D // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    return x / np.sqrt(np.float32(D))


@lru_cache
def random_signs(D, seed=0):
    """D deterministic signs +1 or -1, float32. Read-only."""
    signs = np.random.default_rng(seed).choice(np.float32([-1, 1]), size=D)
    signs.flags.writeable = False
    return signs


def apply(name, x):
    """The transform called `name` (a `Scheme.transform`) of x (..., D), float32."""
    if name is None:
        return x
    return hadamard(x * random_signs(x.shape[-1]) if name == "signed-hadamard" else x)


def invert(name, y):
    """Undo `apply`: the rotation is its own inverse, then the signs."""
    if name is None:
        return y
    x = hadamard(y)
    return x * random_signs(x.shape[-1]) if name == "signed-hadamard" else x


def smooth_keys(k):
    """(K - m, m), m the mean key over tokens, per head and channel, in float64.

    q . (k_t - m) differs from q . k_t by the same q . m at every token t, so the
    attention weights stay as they are. k : (..., T, D). Returns (..., T, D) and
    (..., 1, D). Source: SageAttention (arXiv 2410.02367).
    """
    k = np.asarray(k, dtype=np.float64)
    mean = k.mean(axis=-2, keepdims=True)
    return k - mean, mean


def _check_power_of_two(D):
    if D < 1 or D & (D - 1):
        raise ValueError(f"a Hadamard rotation needs a power of two, not D={D}")
