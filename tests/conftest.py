"""Data that breaks symmetry, and how hypothesis runs."""

import os

import pytest
from hypothesis import settings
from plain import uneven

# The same examples every time in CI; new ones at each run elsewhere.
settings.register_profile(
    "kvq", deadline=None, derandomize="CI" in os.environ, max_examples=50
)
settings.load_profile("kvq")


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
