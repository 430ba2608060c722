"""What the methods of papers share: named arrays that are stored, and one-line sums."""

from abc import ABC, abstractmethod

import numpy as np

from kvq.dtypes import as_float_array


class Method(ABC):
    """A method of a paper for keys or values x (H, T, D).

    What it stores is a dict of arrays; nothing else is needed to decode but the method
    itself, whose rotations and codebooks are shared by all tokens.
    """

    @abstractmethod
    def encode(self, x):
        """The stored arrays of x (H, T, D), by name. Raises TypeError, ValueError."""

    @abstractmethod
    def decode(self, stored, shape):
        """x_hat of shape (H, T, D), float32."""

    def bits_per_element(self, x):
        """Stored bits per number of x: 8 * nbytes of all arrays / size."""
        return stored_bits(self.encode(x), x.size)


def stored_bits(stored, size):
    """8 * nbytes of the stored arrays / size."""
    return 8 * sum(a.nbytes for a in stored.values()) / size


def as_heads(x, multiple_of=1):
    """x as float64 (H, T, D). Raises ValueError for another number of axes or D."""
    x = as_float_array(x)
    if x.ndim != 3 or x.size == 0:
        raise ValueError(f"shape {x.shape}; expected (H, T, D)")
    if x.shape[-1] % multiple_of:
        raise ValueError(f"D={x.shape[-1]}; valid: multiples of {multiple_of}")
    return x.astype(np.float64)


def nearest(y, levels):
    """The index of the nearest of the increasing `levels`, uint8 of the shape of y."""
    middle = (levels[1:] + levels[:-1]) / 2
    return np.searchsorted(middle, y).astype(np.uint8)
