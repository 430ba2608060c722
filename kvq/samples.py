"""Keys, values and queries to work on: real ones, synthetic ones, or a user's file."""

import math
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from kvq.dtypes import as_float_array
from kvq.transforms import rope

ROPE_BASE = 100_000.0  # SmolLM2-135M (its GGUF metadata: llama.rope.freq_base)
LAYERS = (0, 7, 15, 29)  # of its 30 layers, those that the bundled sample holds
SIZE_LIMIT = 4 * 2**30  # bytes that `load_kv` will read from one file


@dataclass(frozen=True, eq=False)
class Sample:
    """k, v (H_kv, T, D) and the newest queries q (H_q, T_q, D), or None."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray | None
    name: str


def real_kv(layer=15):
    """Real keys (after RoPE), values and queries of one layer of SmolLM2-135M-Instruct.

    512 tokens of Jane Austen's *Persuasion*: k, v (3, 512, 64) and the queries of the
    newest 64 tokens, q (9, 64, 64), float16. Layers: 0, 7, 15, 29. Provenance:
    kvq/data/smollm2_sample.md. Raises ValueError for another layer.
    """
    if type(layer) is not int or layer not in LAYERS:
        raise ValueError(f"layer={layer!r}; valid: {', '.join(map(str, LAYERS))}")
    path = files("kvq") / "data" / "smollm2_sample.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        k, v, q = (arrays[f"{name}_{layer}"] for name in "kvq")
    return Sample(k, v, q, f"SmolLM2-135M layer {layer}")


def before_rope(k, base=ROPE_BASE):
    """Keys of the tokens 0..T-1 with their rotary embedding undone, float32."""
    return rope(k, np.arange(k.shape[-2]), base, inverse=True).astype(np.float32)


def synthetic_kv(
    kv_heads=3,
    tokens=512,
    head_dim=64,
    q_heads=9,
    queries=64,
    outlier_channels=2,
    outlier_scale=8.0,
    outlier_offset=0.0,
    seed=0,
):
    """Gaussian keys, values and queries; some key channels are outliers.

    outlier_channels : key channels per head whose numbers are multiplied by
        `outlier_scale` and shifted by `outlier_offset`, at every token: persistent
        channels, as real keys have them.
    Returns a Sample of float32 arrays: k, v (kv_heads, tokens, head_dim) and
    q (q_heads, queries, head_dim).
    Raises ValueError for more outlier channels than channels.
    """
    if not 0 <= outlier_channels <= head_dim:
        raise ValueError(
            f"outlier_channels={outlier_channels}; valid: 0..{head_dim} (head_dim)"
        )
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, kv_heads, tokens, head_dim))
    q = rng.standard_normal((q_heads, queries, head_dim))
    for head in k:
        channels = rng.choice(head_dim, outlier_channels, replace=False)
        head[:, channels] = head[:, channels] * outlier_scale + outlier_offset
    return Sample(*(x.astype(np.float32) for x in (k, v, q)), "synthetic")


# --- a user's file --------------------------------------------------------------------
def load_kv(path, layer=None):
    """Keys, values and (if there) queries from a .npz or .safetensors file.

    Expected names: k, v and optionally q, each (H, T, D), or k_3, v_3, q_3 for layer
    3 (`layer=None` takes the only one there is). Nothing is unpickled; sizes are
    checked against SIZE_LIMIT before anything is read.
    Raises ValueError for a file that does not hold this, TypeError for other numbers
    than float16, bfloat16, float32 and float64, OSError if there is no such file.
    """
    path = str(path)
    if path.endswith(".npz"):
        shapes, read = _open_npz(path)
    elif path.endswith(".safetensors"):
        shapes, read = _open_safetensors(path)
    else:
        raise ValueError(f"{path}: unknown kind of file; valid: .npz, .safetensors")
    suffix = "" if layer is None else f"_{layer}"
    if layer is None and "k" not in shapes:
        layers = [name[1:] for name in shapes if name.startswith("k_")]
        if len(layers) != 1:
            raise ValueError(
                f"{path}: holds {', '.join(sorted(shapes))}; expected k and v, or "
                "k_N and v_N with layer=N"
            )
        suffix = layers[0]
    for name in (f"k{suffix}", f"v{suffix}"):
        if name not in shapes:
            raise ValueError(
                f"{path}: has no {name!r}; it holds {', '.join(sorted(shapes))}"
            )
    names = [n for n in (f"k{suffix}", f"v{suffix}", f"q{suffix}") if n in shapes]
    arrays = [as_float_array(read(n), f"{path}: {n}") for n in names]
    q = arrays[2] if len(arrays) > 2 else None
    _check_shapes(path, *arrays[:2], q)
    return Sample(*arrays[:2], q, path.rsplit("/", 1)[-1] + suffix.replace("_", " "))


def _check_shapes(path, k, v, q):
    fits = (
        k.ndim == v.ndim == 3
        and k.shape[:2] == v.shape[:2]
        and min(k.shape) > 0
        and (q is None or (q.ndim == 3 and min(q.shape) > 0))
        and (q is None or (q.shape[2] == k.shape[2] and q.shape[0] % k.shape[0] == 0))
    )
    if not fits:
        shapes = [x.shape for x in (k, v, q) if x is not None]
        raise ValueError(
            f"{path}: shapes {shapes}; expected k (H_kv, T, D), v (H_kv, T, D_v) and "
            "q (H_q, T_q, D), H_q a multiple of H_kv"
        )


def _check_size(nbytes):
    if nbytes > SIZE_LIMIT:
        raise ValueError(f"{nbytes:,} bytes; at most {SIZE_LIMIT:,} are read")


@contextmanager
def _reading(path, *errors):
    """Whatever a broken file makes its reader raise, as one line that names it."""
    try:
        yield
    except (ValueError, EOFError, RuntimeError, *errors) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: cannot be read ({reason})") from None


def _open_npz(path):
    """Shapes by name, and a function that reads one array of a .npz file."""
    errors, shapes = (zipfile.BadZipFile, zlib.error), {}
    with _reading(path, *errors), zipfile.ZipFile(path) as archive:
        _check_size(sum(i.file_size for i in archive.infolist()))
        for info in archive.infolist():
            with archive.open(info) as member:
                name = info.filename.removesuffix(".npy")
                shapes[name] = _npy_shape(member, info.file_size)

    def read(name):
        with _reading(path, *errors), np.load(path, allow_pickle=False) as arrays:
            return arrays[name]

    return shapes, read


def _npy_shape(member, size):
    """The shape in a .npy header, which must promise no more than the file holds."""
    version = np.lib.format.read_magic(member)
    header = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = header(member)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"array of shape {shape} and dtype {dtype} does not fit")
    return shape


def _open_safetensors(path):
    """Shapes by name, and a function that reads one tensor of a .safetensors file."""
    import ml_dtypes  # noqa: F401 (makes bfloat16 a dtype that NumPy can read)
    from safetensors import SafetensorError, safe_open

    errors = (SafetensorError, AttributeError)  # the latter for a dtype NumPy lacks
    with _reading(path, *errors), safe_open(path, framework="numpy") as file:
        shapes = {n: file.get_slice(n).get_shape() for n in file.keys()}  # noqa: SIM118
        _check_size(4 * sum(math.prod(s) for s in shapes.values()))

    def read(name):
        with _reading(path, *errors), safe_open(path, framework="numpy") as file:
            return file.get_tensor(name)

    return shapes, read
