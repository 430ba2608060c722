"""KV-cache quantization: the readable NumPy reference.

Read the modules in this order: scheme, quantizer (codebooks, dtypes), packing,
tensor, transforms, attention, cache; then metrics and bounds, memory, roofline and
hardware, study and plots. Importing this package imports NumPy and nothing heavier.
"""

from kvq.attention import attention
from kvq.cache import KVCache
from kvq.memory import cache_bytes
from kvq.packing import pack, unpack
from kvq.scheme import PRESETS, Policy, Scheme, policy
from kvq.tensor import QuantizedTensor, quantize

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "KVCache",
    "Policy",
    "QuantizedTensor",
    "Scheme",
    "attention",
    "cache_bytes",
    "pack",
    "policy",
    "quantize",
    "unpack",
]
