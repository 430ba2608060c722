"""Cache formats of other systems, byte for byte: one module per system.

Every format has a name, "system:format", the version whose bytes it writes, and
`encode(x) -> bytes`, `decode(bytes, shape) -> float32`, `nbytes(shape)`. vLLM's slots
hold keys and values in one record: `encode(k, v)` and a pair out of `decode`. The
methods of papers that have no byte format are in the `research` modules.
"""

from importlib import import_module

# In the order of the generated table.
SYSTEMS = ("ggml", "vllm", "tensorrt_llm", "huggingface", "minifloat")


def all_formats():
    """Every format by name: {"ggml:q8_0": Format, ...}."""
    found = {}
    for system in SYSTEMS:
        found.update(import_module(f"kvq.formats.{system}").FORMATS)
    return found


def find_format(name):
    """The format called `name`. Raises ValueError."""
    found = all_formats()
    if name not in found:
        raise ValueError(f"unknown format {name!r}; valid: {', '.join(found)}")
    return found[name]
