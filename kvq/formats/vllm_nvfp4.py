"""vLLM's NVFP4 cache: pages, because V scales of four tokens are interleaved.

    page = K codes | K scales | V codes | V scales

In each part heads come first, then tokens (the order that vLLM calls HND). K scales
are in order; V scales are swizzled for each head (`minifloat.swizzle_scales`).

Source: csrc/nvfp4_kv_cache_kernels.cu, vllm/v1/attention/backends/flashinfer.py.
"""

from dataclasses import dataclass

import numpy as np

from kvq.formats.minifloat import (
    nvfp4_decode,
    nvfp4_encode,
    swizzle_scales,
    unswizzle_scales,
)
from kvq.formats.vllm_slots import PairFormat


@dataclass(frozen=True, kw_only=True)
class Nvfp4Pages(PairFormat):
    """nvfp4 and nvfp4_4over6: k and v of shape (H, T, D), H and D alike in all pages.

    k_scale, v_scale : float32, of the layer. four_over_six : `minifloat.nvfp4_encode`.
    block_size : tokens per page, a multiple of 4; zeros follow the last token.
    """

    k_scale: np.float32
    v_scale: np.float32
    four_over_six: bool = False
    block_size: int = 16

    def page_bytes(self, H, D, value_dim=None):
        """Bytes of a page of `block_size` tokens. Raises ValueError."""
        dims = D, value_dim or D
        for n in dims:
            if n % 16:
                raise ValueError(f"{self.name}: D={n}; valid: multiples of 16")
        return H * self.block_size * sum(n // 2 + n // 16 for n in dims)

    def nbytes(self, shape, value_dim=None):
        H, T, D = shape
        return -(-T // self.block_size) * self.page_bytes(H, D, value_dim)

    def encode(self, k, v):
        k, v = self.check(k, v)
        self.page_bytes(k.shape[0], k.shape[-1], v.shape[-1])
        parts = []
        for x, scale, is_value in ((k, self.k_scale, False), (v, self.v_scale, True)):
            codes, S = nvfp4_encode(self._pages(x), scale, self.four_over_six)
            parts += [codes, swizzle_scales(S) if is_value else S]
        pages = [part.reshape(len(part), -1) for part in parts]
        return np.concatenate(pages, axis=-1).tobytes()

    def decode(self, data, shape, value_dim=None):
        pages = self.check_bytes(data, shape, value_dim)
        H, T, D = shape
        pages = pages.reshape(-1, self.page_bytes(H, D, value_dim))
        tensors = []
        for n, scale in ((D, self.k_scale), (value_dim or D, self.v_scale)):
            codes, S, pages = self._split(pages, H, n)
            S = unswizzle_scales(S) if tensors else S
            x = nvfp4_decode(codes, S, scale)
            tensors.append(x.swapaxes(0, 1).reshape(H, -1, n)[:, :T])
        return tuple(tensors)

    def check_shape(self, shape):
        super().check_shape(shape)
        if len(shape) != 3:
            raise ValueError(f"{self.name}: shape {tuple(shape)}; expected (H, T, D)")

    def _pages(self, x):
        """x (H, T, D) -> (pages, H, block_size, D), zeros after the last token."""
        H, T, D = x.shape
        x = np.pad(x, [(0, 0), (0, -T % self.block_size), (0, 0)])
        return x.reshape(H, -1, self.block_size, D).swapaxes(0, 1)

    def _split(self, pages, H, n):
        """Codes (pages, H, N, n/2), scales (pages, H, N, n/16), and what follows."""
        N = self.block_size
        ends = np.cumsum([H * N * n // 2, H * N * n // 16])
        codes, S, rest = np.split(pages, ends, axis=-1)
        return codes.reshape(-1, H, N, n // 2), S.reshape(-1, H, N, n // 16), rest
