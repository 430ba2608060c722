"""Data that breaks symmetry, and how hypothesis runs."""

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("kvq", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("kvq")


def uneven(shape, seed=0, dtype=np.float32):
    """Gaussian numbers with an outlier channel, a shifted channel, a constant channel.

    shape : (..., T, D). The first 4 tokens of the last head are constant as well.
    """
    x = np.random.default_rng(seed).standard_normal(shape)
    D = shape[-1]
    x[..., 1 % D] *= 20
    x[..., 2 % D] += 7
    x[..., 3 % D] = -1.5
    x.reshape(-1, *shape[-2:])[-1, :4] = 0.625
    return x.astype(dtype)


@pytest.fixture
def make():
    """The function `uneven`."""
    return uneven


@pytest.fixture
def x():
    """Keys (H, T, D) = (2, 37, 20): no two dimensions alike, none a multiple of 8."""
    return uneven((2, 37, 20))


@pytest.fixture
def kv():
    """k (2, 75, 16), v (2, 75, 12) and the newest queries q (6, 5, 16), float32."""
    return uneven((2, 75, 16)), uneven((2, 75, 12), 1), uneven((6, 5, 16), 2)
