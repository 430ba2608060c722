"""HQQ's refinement as Numba compiles it: equal to NumPy's but for the power."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvq.formats import huggingface
from kvq.formats.huggingface import FORMATS, Hqq, with_dtype
from kvq.samples import real_kv

numba = pytest.importorskip("numba", reason="compares with compiled code")
from kvq.formats import hqq_refine  # noqa: E402

f32 = np.float32
SHAPE = (1, 2, 268, 64)  # 536 groups: more than a run of columns, and a ragged one


def normal(rng):
    return rng.standard_normal(SHAPE)


def heavy_tails(rng):
    return np.clip(rng.standard_cauchy(SHAPE), -6e4, 6e4)


def constant_groups_and_an_outlier_channel(rng):
    x = rng.standard_normal(SHAPE)
    x[:, 1, ::5] = 0.5
    x[..., 3] *= 200
    x[:, 0, 7] = 0
    return x


def huge_outliers(rng):
    x = rng.standard_normal(SHAPE)
    x[..., ::9, 5] = -6e4
    return x


def far_from_zero(rng):
    return 900 + rng.standard_normal(SHAPE)


def tiny(rng):
    return 1e-3 * rng.standard_normal(SHAPE)


def real_keys(rng):
    return real_kv().k[None, :2, :268]


DATA = (
    *(normal, heavy_tails, constant_groups_and_an_outlier_channel, huge_outliers),
    *(far_from_zero, tiny, real_keys),
)


@numba.njit
def powers(x, out):
    for i in range(x.size):
        out[i] = hqq_refine.power(max(x[i], hqq_refine.SMALL))


def compiled_power(self, size):
    """The power of the compiled step, for NumPy's."""
    out = np.empty(size.size, f32)
    powers(np.ravel(size), out)
    return out.reshape(size.shape)


@pytest.fixture
def encode(monkeypatch):
    """encode(form, x, compiled) -> bytes, whatever the size of x."""

    def encode(form, x, compiled):
        monkeypatch.setattr(huggingface, "LARGE", 0 if compiled else np.inf)
        return form.encode(x)

    return encode


@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_equal_bytes_if_numpy_takes_the_same_power(
    bits, axis, data, encode, monkeypatch
):
    x = data(np.random.default_rng(bits)).astype(f32)
    monkeypatch.setattr(Hqq, "power", compiled_power)
    for dtype in ("float16", "bfloat16", "float32"):
        form = with_dtype(f"hf:hqq-int{bits}-axis{axis}", dtype)
        assert encode(form, x, compiled=True) == encode(form, x, compiled=False)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("groups", [8, 64, 72, 512, 520, 1032])
def test_equal_bytes_for_any_number_of_groups(groups, axis, encode, monkeypatch):
    x = np.random.default_rng(groups).standard_normal((groups, 64)).astype(f32)
    x *= np.linspace(0.1, 9, groups)[:, None].astype(f32)
    monkeypatch.setattr(Hqq, "power", compiled_power)
    form = with_dtype(f"hf:hqq-int4-axis{axis}", "float32")
    assert encode(form, x, compiled=True) == encode(form, x, compiled=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_are_done_may_be_set_aside(
    bits, axis, compiled, encode, monkeypatch
):
    x = np.random.default_rng(1).standard_normal((1032, 64)).astype(f32)
    x *= np.linspace(0.05, 1.5, 1032)[:, None].astype(f32)
    form = with_dtype(f"hf:hqq-int{bits}-axis{axis}", "float32")
    sizes = []
    step = form.fastest_step
    monkeypatch.setattr(
        Hqq,
        "fastest_step",
        lambda self, m: lambda x, s, z: sizes.append(z.size) or step(m)(x, s, z),
    )
    data = encode(form, x, compiled)
    assert max(sizes) == 1032
    assert 64 <= min(sizes) < 516
    monkeypatch.setattr(huggingface, "FEW", np.inf)
    assert encode(form, x, compiled) == data


def zeros_and_codes(form, x, encode):
    """Zeros (float32) and packed codes, by NumPy and compiled."""
    end = form.packed_bytes(x.shape)
    both = [encode(form, x, compiled) for compiled in (False, True)]
    zeros = [form.numbers(np.frombuffer(d[end:], np.uint8))[1] for d in both]
    return zeros, [np.frombuffer(d[:end], np.uint8) for d in both]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_numpys_own_power_moves_few_last_places(bits, axis, encode):
    x = heavy_tails(np.random.default_rng(3)).astype(f32)
    form = with_dtype(f"hf:hqq-int{bits}-axis{axis}", "float32")
    (a, b), codes = zeros_and_codes(form, x, encode)
    # The mean of 64 numbers, some of which e' has moved by a last place of their own.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert np.mean(codes[0] != codes[1]) < 1e-3


def test_without_large_errors_no_power_counts(encode):
    x = normal(np.random.default_rng(3)).astype(f32)
    form = with_dtype("hf:hqq-int8-axis1", "float32")
    assert encode(form, x, compiled=True) == encode(form, x, compiled=False)


def test_power_is_within_one_and_a_half_last_places():
    x = np.exp2(np.linspace(-3, 101, 1_000_003)).astype(f32)
    x = np.concatenate([x, np.linspace(0.125, 8, 1_000_003, dtype=f32)])
    got, want = compiled_power(None, x), x.astype(np.float64) ** -0.3
    error = (got - want) / np.spacing(want.astype(f32))
    assert 0.5 < np.abs(error).max() < 1.5


def test_small_errors_are_dropped_whole():
    less = (f32(hqq_refine.SMALL) ** f32(-0.3)) / 10
    assert less > hqq_refine.SMALL
    e = np.linspace(-0.125, 0.125, 101, dtype=f32)
    form = FORMATS["hf:hqq-int2-axis1"]
    np.testing.assert_array_equal(form.shrink(e, np.abs(e)), 0)


# --- which of the two -----------------------------------------------------------------
def test_numpy_where_numba_would_not_pay_or_is_missing(monkeypatch):
    form = FORMATS["hf:hqq-int4-axis1"]
    large = np.empty((2**14, 64), f32)
    assert form.fastest_step(large).func is hqq_refine.step
    assert form.fastest_step(large[:-1]) == form.step
    narrow = replace(form, group=32)
    assert narrow.fastest_step(large) == narrow.step
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    assert form.fastest_step(large) == form.step


def test_small_tensors_do_not_import_numba():
    code = (
        "import sys, numpy as np; from kvq.formats.huggingface import FORMATS; "
        "FORMATS['hf:hqq-int4-axis0'].encode(np.ones((8, 64), np.float32)); "
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
