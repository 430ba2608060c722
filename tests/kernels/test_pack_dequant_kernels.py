"""`pack` and `dequant` in both languages, run from their PTX: exact and coalesced.

The simulator also reports every access out of bounds and every race, so a run that ends
has none of them.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from fresh import compiled
from plain import uneven

from kvq.dtypes import numpy_dtype
from kvq.kernels import ptxsim
from kvq.kernels.dequant import v2_magic_words
from kvq.kernels.launch.compilers import COMPILERS
from kvq.kernels.layouts import row_words, to_words
from kvq.kernels.pack import v2_one_pass
from kvq.scheme import Scheme
from kvq.tensor import quantize

C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
A, S = "asymmetric", "symmetric"
HALF, FLOAT, BRAIN = "float16", "float32", "bfloat16"


def run(language, source, kernel, constants, geometry, args):
    """Launch it; returns the counters. An int is an int32."""
    args = [np.int32(a) if isinstance(a, int) else a for a in args]
    code = compiled(language, source, kernel, tuple(sorted(constants.items())))
    return code.launch(*geometry, args if language == "c" else ptxsim.numba_args(args))


def unwritten(shape, dtype):
    """A flat array, all bits set."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.full(size, 0xFF, np.uint8).view(dtype)


def blocks(threads):
    return -(-threads // 256), 256


def run_pack(language, version, x, scheme):
    """(scale, zero, words, counters) of x (N, T, D)."""
    (N, T, D), S = x.shape, C_TYPES[scheme.scale_dtype]
    groups = (N, *scheme.metadata_shape(N, T, D)[1:])
    layout = {"v1": "canonical", "v2": "paired"}[version]
    rows = (N, T, row_words(D, scheme.bits, layout))
    # Symmetric levels have no zeros: an array of one element stands for them.
    zeros = groups if scheme.has_zero else (1,)
    scale, zero = (unwritten(s, scheme.scale_dtype) for s in (groups, zeros))
    words, X = unwritten(rows, np.uint32), C_TYPES[x.dtype.name]
    flat = (
        x.reshape(-1)
        if x.dtype != numpy_dtype(BRAIN)
        else x.reshape(-1).view(np.uint16)
    )
    arrays = flat, scale, zero, words
    if version == "v1":
        _, gt, gc = scheme.group_shape(N, T, D)
        numbers = N, T, D, gt, gc, scheme.bits, int(scheme.has_zero)
        program = language, "pack/v1_word_per_thread"
        types = {"X": X, "S": S}
        run(*program, "pack_v1_scales", types, blocks(scale.size), arrays[:3] + numbers)
        counters = run(*program, "pack_v1", types, blocks(words.size), arrays + numbers)
    else:
        constants = v2_one_pass.constants(scheme, D, X, S)
        geometry = v2_one_pass.geometry(SimpleNamespace(**constants), N, T)
        program = language, "pack/v2_one_pass", "pack_v2"
        counters = run(*program, constants, geometry, (*arrays, N, T))
    return scale.reshape(groups), zero.reshape(zeros), words.reshape(rows), counters


def check_pack(language, version, x, scheme):
    """Scales, zeros and words are those of the reference; returns the counters."""
    scale, zero, words, counters = run_pack(language, version, x, scheme)
    expected = quantize(x, scheme)
    np.testing.assert_array_equal(scale, expected.scale)
    if scheme.has_zero:
        np.testing.assert_array_equal(zero, expected.zero)
    else:
        assert (zero.view(np.uint8) == 0xFF).all(), "written, though there are no zeros"
    layout = {"v1": "canonical", "v2": "paired"}[version]
    np.testing.assert_array_equal(
        words, to_words(expected.unpack(), scheme.bits, layout)
    )
    return counters


def check_dequant(language, version, qt, Y="float"):
    """x_hat is bit for bit that of the reference; returns the counters."""
    (N, T, D), scheme = qt.shape, qt.scheme
    layout = {"v1": "canonical", "v2": "paired"}[version]
    words = to_words(qt.unpack(), scheme.bits, layout).reshape(-1)
    zero = np.zeros(1, qt.scale.dtype) if qt.zero is None else qt.zero.reshape(-1)
    y = unwritten(qt.shape, np.float32 if Y == "float" else np.float16)
    arrays, S = (words, qt.scale.reshape(-1), zero, y), C_TYPES[scheme.scale_dtype]
    if version == "v1":
        _, gt, gc = scheme.group_shape(N, T, D)
        numbers = N, T, D, gt, gc, scheme.bits, int(scheme.has_zero)
        program = language, "dequant/v1_value_per_thread", "dequant_v1", {"S": S}
        counters = run(*program, blocks(y.size), arrays + numbers)
    else:
        constants = v2_magic_words.constants(scheme, D, S, Y)
        geometry = v2_magic_words.geometry(SimpleNamespace(**constants), N, T)
        program = language, "dequant/v2_magic_words", "dequant_v2", constants
        counters = run(*program, geometry, (*arrays, N, T))
    expected = qt.dequantize()
    if Y != "float":
        expected = np.clip(expected, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(y.reshape(qt.shape), expected)
    return counters


def hard(N, T, D, dtype):
    """Uneven numbers; zeros of both signs, tiny and huge ones in the last head."""
    x = uneven((N, T, D))
    last = x[-1]
    last[4], last[4, ::3] = 0.0, -0.0
    last[5] *= 1e-7  # subnormal in float16, scales below its smallest
    if dtype != HALF:
        last[6, D // 2] = 1e30  # beyond every float16
        last[5] *= 1e-36
    return x.astype(numpy_dtype(dtype))


V1 = [  # bits, per, group, levels, scale_dtype, D, dtype of x
    (4, "token", 5, A, HALF, 13, HALF),
    (3, "channel", 6, S, FLOAT, 13, HALF),
    (8, "head", None, S, HALF, 9, FLOAT),
    (1, "token", None, A, FLOAT, 33, FLOAT),
    (5, "head", 7, A, HALF, 13, HALF),
    (7, "channel", None, A, FLOAT, 80, FLOAT),
    (2, "token", 4, S, HALF, 20, FLOAT),
    (6, "token", 32, S, FLOAT, 48, HALF),
]


@pytest.mark.parametrize("language", COMPILERS)
@pytest.mark.parametrize(("bits", "per", "group", "levels", "scale", "D", "dtype"), V1)
def test_v1_is_the_reference(language, bits, per, group, levels, scale, D, dtype):
    x, scheme = hard(3, 11, D, dtype), Scheme(bits, per, group, levels, scale)
    check_pack(language, "v1", x, scheme)
    check_dequant(language, "v1", quantize(x, scheme))


V2 = [  # bits, per, group, levels, scale_dtype, D, T, dtype of x
    (4, "channel", 32, A, HALF, 128, 37, HALF),
    (3, "token", 16, A, FLOAT, 96, 7, HALF),
    (2, "token", 64, A, HALF, 96, 7, FLOAT),
    (3, "channel", 16, S, HALF, 80, 21, FLOAT),
    (8, "token", None, S, FLOAT, 64, 9, FLOAT),
    (4, "token", 32, A, HALF, 80, 11, HALF),
]
V2_C = [
    (4, "token", 128, A, FLOAT, 64, 9, HALF),
    (4, "token", None, A, HALF, 256, 7, FLOAT),
    (3, "token", 128, S, HALF, 256, 8, HALF),
    (8, "token", 16, A, HALF, 96, 7, HALF),
    (2, "token", None, S, HALF, 80, 9, HALF),
    (8, "channel", 64, A, FLOAT, 256, 67, FLOAT),
    (2, "channel", 128, A, HALF, 64, 130, HALF),
    (3, "channel", 32, S, FLOAT, 96, 33, HALF),
    (4, "channel", 16, A, HALF, 80, 19, HALF),
]
EACH = [("c", *case) for case in V2 + V2_C] + [("numba", *case) for case in V2]


@pytest.mark.parametrize(
    ("language", "bits", "per", "group", "levels", "scale", "D", "T", "dtype"), EACH
)
def test_v2_is_the_reference(language, bits, per, group, levels, scale, D, T, dtype):
    x, scheme = hard(3, T, D, dtype), Scheme(bits, per, group, levels, scale)
    check_pack(language, "v2", x, scheme)
    check_dequant(language, "v2", quantize(x, scheme))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("per", ["token", "channel"])
def test_bfloat16_in_c(version, per):
    check_pack("c", version, hard(2, 35, 96, BRAIN), Scheme(4, per, 32, A))


@pytest.mark.parametrize(
    ("bits", "scale"), [(2, HALF), (3, HALF), (4, FLOAT), (8, HALF)]
)
def test_v2_writes_float16_without_infinities(bits, scale):
    x = hard(2, 35, 80, HALF)
    x[0, 1] = np.where(np.arange(80) % 2, 65504, -65504)  # x_hat may lie beyond
    check_dequant("c", "v2", quantize(x, Scheme(bits, "token", 32, A, scale)), "__half")


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("per", ["token", "channel"])
def test_one_token_of_one_head(version, per):
    x, scheme = uneven((1, 1, 64)).astype(HALF), Scheme(4, per, 32, A)
    check_pack("c", version, x, scheme)
    check_dequant("c", version, quantize(x, scheme))


# --- counters -------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("per", "group", "D", "dtype"),
    [
        ("token", 64, 128, HALF),
        ("token", 32, 80, FLOAT),
        ("channel", 32, 128, HALF),
        ("channel", 64, 96, HALF),
        ("channel", 32, 256, FLOAT),
    ],
)
def test_v2_moves_whole_sectors_without_bank_conflicts(bits, per, group, D, dtype):
    x, scheme = uneven((2, 128, D)).astype(dtype), Scheme(bits, per, group, A)
    for report in (
        check_pack("c", "v2", x, scheme),
        check_dequant("c", "v2", quantize(x, scheme)),
    ):
        assert report.sectors <= 1.05 * report.ideal_sectors
        assert report.wavefronts <= 1.1 * report.ideal_wavefronts


def test_v2_reads_x_once():
    x, scheme = uneven((2, 128, 96)).astype(HALF), Scheme(4, "channel", 32, A)
    sectors = {v: check_pack("c", v, x, scheme).sectors for v in ("v1", "v2")}
    stored = quantize(x, scheme).nbytes
    assert sectors["v2"] == (x.nbytes + stored) // 32
    assert sectors["v1"] > 4 * sectors["v2"]


# --- what v2 does not do, and its grids -----------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "D", "reason"),
    [
        (Scheme(5, "token", 32, A), 128, "bits=5; valid: 2, 3, 4, 8"),
        (Scheme(4, "head", 32, A), 128, "per='head'; valid: token, channel"),
        (Scheme(4, "token", 32, A), 72, "D=72; valid: 64, 80, 96, 128, 256"),
        (Scheme(4, "token", 48, A), 96, "group=48; valid: 16, 32, 64, 128"),
        (Scheme(3, "token", 16, A), 80, "group=16 of 3-bit rows of 36 bytes"),
        (Scheme(4, "channel", None, A), 96, "group=None; valid: 16, 32, 64, 128"),
        (Scheme(4, "channel", 256, A), 96, "group=256; valid: 16, 32, 64, 128"),
        (Scheme(4, levels="full-range"), 64, "levels='full-range'; valid: symm"),
        (
            Scheme(4, scale_dtype="bfloat16"),
            64,
            "scale_dtype='bfloat16'; valid: float16",
        ),
        (Scheme(4, rounding="half-away"), 64, "rounding='half-away'; valid: half-even"),
        (Scheme(4, transform="hadamard"), 64, "transform='hadamard'; valid: None"),
    ],
)
def test_what_pack_v2_does_not_know(scheme, D, reason):
    assert v2_one_pass.unsupported(scheme, D).startswith(reason)


def test_what_v2_knows():
    for D in v2_one_pass.HEAD_DIMS:
        for group in (16, 32, 64, 128, None, 300):
            assert v2_one_pass.unsupported(Scheme(4, "token", group), D) is None
            assert v2_magic_words.unsupported(Scheme(4, "token", group), D) is None


@pytest.mark.parametrize(
    ("scheme", "D", "reason"),
    [
        (Scheme(6), 128, "bits=6; valid: 2, 3, 4, 8"),
        (Scheme(4, "token", 24), 96, "group=24; valid: multiples of 16"),
        (Scheme(4, "channel", None), 96, "group=None; valid: an integer"),
        (
            Scheme(4, levels="nf4"),
            96,
            "levels='nf4'; valid: symmetric, asymmetric, full",
        ),
        (Scheme(4, "head", 32), 96, "per='head'; valid: token, channel"),
        (Scheme(4), 100, "D=100; valid: 64, 80, 96, 128, 256"),
        (Scheme(4, transform="hadamard"), 64, "transform='hadamard'; valid: None"),
    ],
)
def test_what_dequant_v2_does_not_know(scheme, D, reason):
    assert v2_magic_words.unsupported(scheme, D).startswith(reason)


@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize(("N", "T"), [(70_000, 4096), (8, 2**24)])
def test_grids_stay_within_the_limits(per, N, T):
    for D in v2_one_pass.HEAD_DIMS:
        for bits in v2_one_pass.BITS:
            scheme = Scheme(bits, per, 16)
            for module, types in (
                (v2_one_pass, ("float", "__half")),
                (v2_magic_words, ("__half", "float")),
            ):
                c = SimpleNamespace(**module.constants(scheme, D, *types))
                grid, block = module.geometry(c, N, T)
                assert 1 <= grid < 2**31
                assert block % 32 == 0
                assert block <= 1024
