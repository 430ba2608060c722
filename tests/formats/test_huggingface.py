"""Hugging Face's QuantizedCache: golden bytes, the real packages, what goes wrong.

The golden arrays come from optimum-quanto 0.2.7 and hqq 0.2.8.post1 on float32 tensors.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from plain import uneven

from kvq.cache import KVCache
from kvq.dtypes import cast
from kvq.formats.grouped import (
    in_parts,
    minmax_encode,
    pack_rows,
    rounded,
    unpack_rows,
)
from kvq.formats.grouped import parts as parts_of
from kvq.formats.huggingface import FORMATS, RequantizingCache, with_dtype
from kvq.metrics import nmse
from kvq.samples import real_kv
from kvq.scheme import Policy, Scheme
from kvq.tensor import quantize

GROUPED = [name for name in FORMATS if name != "hf:fp8"]
DTYPES = ("float16", "bfloat16", "float32")


def ramp(*shape):
    i = np.arange(math.prod(shape))
    x = ((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07
    return x.astype(np.float32).reshape(shape)


def parts(form, data, shape):
    """(packed codes in hex, scales, offsets) of encoded bytes."""
    end = form.packed_bytes(shape)
    scale, offset = np.frombuffer(data[end:], "<f4").reshape(2, -1)
    return data[:end].hex(), scale, offset


# --- golden bytes ---------------------------------------------------------------------
def test_quanto_0_2_7_int4_axis_0():
    form = with_dtype("hf:quanto-int4-axis0", "float32")
    x = ramp(1, 1, 2, 64)
    codes, scale, shift = parts(form, form.encode(x), x.shape)
    assert codes == (
        "008923bb55ed77019a34cb55ee8812aa34cc66ff9822bb45dd77019933cc55ee7812aa43cc66ff89"
        "22aa44dd77009923bb55ed7711aa34cc56ee8822ba44dd67"
    )
    assert scale.tolist() == [np.float32(0.5436667203903198), 0.5223333239555359]
    assert shift.tolist() == [3.875, 3.625]


def test_quanto_0_2_7_int2_axis_minus_1():
    form = replace(with_dtype("hf:quanto-int2-axis-1", "float32"), group=32)
    x = ramp(1, 2, 32, 4)
    codes, scale, shift = parts(form, form.encode(x), x.shape)
    assert codes == (
        "8888222288886666dddd7777dddd8888622299996666dddd777722228888226299997776dddd7777"
        "22228888666699997777dddd8888222299996666dddd7777"
    )
    want = (
        "2.54666686 2.54666662 2.54666686 2.54666686 2.56999993 2.45333314 2.56999993"
    )
    np.testing.assert_array_equal(scale, np.float32([*want.split(), 2.54666662]))
    want = "3.875 3.7349999 3.75 3.6099999 3.625 3.41499996 3.43000007 3.5"
    np.testing.assert_array_equal(shift, np.float32(want.split()))


HQQ_GOLDEN = {
    "int4-axis1": (
        "009832bb55de7710a943cc55ee8821aa43cc66ff8922bb54dd77109933cc55ee8721aa34cc66"
        "ff9822aa44dd77009932bb55de7711aa43cc65ee8822ab44dd76"
    ),
    "int4-axis0": (
        "019832bb55de7711aa33cc55ee8822aa44cc76ff8922bb54ee77109933cc56ee8811aa34cc66"
        "ff8822aa54dd77019932cc55ee7711aa44cc66ee8822ab44dd66"
    ),
    "int2-axis0": ("2188229966dd772288669977dd882298669977dd88229966dd772288669977dd"),
    "int8-axis1": (
        "00932bbe57df7710a33cc35cef8820a841d46cff8d25b851e4710a9d35c856e9811aad3bcd66"
        "f9921fb24bde7604972fc25be37b14a73fc760f38b24ac45d770018e23bc50e972069f34cc55"
        "ee8317b039d266ff931cb54ae27700992dc65ae87c11aa3ecb60f98d21af43dc71059227c054"
        "ed760aa338d059f2871bb43dd66a"
    ),
}
HQQ_NUMBERS = {  # scales, zeros
    "int4-axis1": ([0.54366672, 0.52233332], [7.13224458694458, 6.951041221618652]),
    "int4-axis0": ([0.53066667, 0.53533339], [7.304986000061035, 7.005086898803711]),
    "int2-axis0": ([2.6533331871, 2.6766669750], [1.4052557945, 1.3818798065]),
}


@pytest.mark.parametrize("name", HQQ_GOLDEN)
def test_hqq_0_2_8_post1(name):
    form = with_dtype(f"hf:hqq-{name}", "float32")
    x = ramp(1, 1, 2, 64)
    codes, scale, zero = parts(form, form.encode(x), x.shape)
    assert codes == HQQ_GOLDEN[name]
    if name in HQQ_NUMBERS:  # up to the order of a mean over 64 numbers
        np.testing.assert_allclose(scale, HQQ_NUMBERS[name][0], rtol=2e-7)
        np.testing.assert_allclose(zero, HQQ_NUMBERS[name][1], rtol=1e-6)


def test_hqq_0_2_8_post1_without_refinement():
    form = with_dtype("hf:hqq-int4-axis1", "float32")
    form = replace(form, optimize=False)
    x = ramp(1, 1, 2, 64)
    codes, _, zero = parts(form, form.encode(x), x.shape)
    refined = bytearray.fromhex(HQQ_GOLDEN["int4-axis1"])
    refined[10] = 0xBC
    assert codes == refined.hex()
    assert zero.tolist() == [np.float32(7.127528190612793), 6.940013408660889]


# --- every format ---------------------------------------------------------------------
# NMSE of min-max codes of 64 Gaussian numbers, a few percent above the measured ones.
GAUSSIAN_LIMITS = {"1": 2.6, "2": 0.21, "3": 0.035, "4": 0.0083, "8": 7e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_gaussian_numbers_come_back(name, dtype):
    form = with_dtype(name, dtype)
    x = np.random.default_rng(0).standard_normal((2, 3, 64, 20))
    data = form.encode(x)
    assert len(data) == form.nbytes(x.shape)
    x_hat = form.decode(data, x.shape)
    assert x_hat.dtype == np.float32
    np.testing.assert_array_equal(x_hat, rounded(x_hat, dtype))
    limit = 8e-4 if name == "hf:fp8" else GAUSSIAN_LIMITS[form.facts.bits]
    assert limit / 4 < nmse(x, x_hat) < limit


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("bits", [2, 4])
def test_quanto_errs_by_half_a_step_at_most(bits, axis):
    form = with_dtype(f"hf:quanto-int{bits}-axis{axis}", "float32")
    x = uneven((2, 3, 64, 20))
    step = {0: x.reshape(-1, 64).T, -1: x.reshape(-1, 64, 20).swapaxes(0, 1)}[axis]
    step = np.ptp(step, axis=0) / (2**bits - 1)
    error = np.abs(form.decode(form.encode(x), x.shape) - x)
    groups = error.reshape((-1, 64) if axis == 0 else (-1, 64, 20))
    np.testing.assert_array_less(groups.max(axis=1), step / 2 + 1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, -2.5, 3e-5, 30000.0])
def test_a_constant_tensor_is_exact(name, value):
    form = FORMATS[name]
    x = np.full((2, 64, 128), value, np.float16)
    np.testing.assert_allclose(form.decode(form.encode(x), x.shape), x, rtol=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_bits_per_element_counts_everything(bits, axis):
    shape = (2, 160, 64)
    padded = 70 / 64 if (bits, axis) == (3, 0) else 1  # 64 rows, ten in a word
    stored = {3: 3.2}.get(bits, bits) * padded  # 30 of 32 bits of a word are used
    form = FORMATS[f"hf:hqq-int{bits}-axis{axis}"]
    assert form.bits_per_element(shape) == pytest.approx(stored + 2 * 16 / 64)


@pytest.mark.parametrize("rows", [1, 7, 10, 23])
def test_pack_rows_fills_missing_rows_with_zeros(rows):
    codes = np.random.default_rng(rows).integers(0, 8, (rows, 5), dtype=np.uint8)
    shifts = range(27, -1, -3)
    words = pack_rows(codes, shifts, np.int32)
    n = -(-rows // 10)
    assert words.shape == (n, 5)
    for r in range(rows):
        at = 27 - 3 * (r // n)
        np.testing.assert_array_equal(words[r % n] >> at & 7, codes[r])
    assert sum(int(w).bit_count() for w in words.ravel()) == sum(
        int(c).bit_count() for c in codes.ravel()
    )
    np.testing.assert_array_equal(unpack_rows(words, shifts, 3, rows), codes)


# --- a few groups at a time -----------------------------------------------------------
@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("groups", [1, 3, 1023, 1024, 1025, 5000])
def test_parts_are_the_whole(groups, along):
    shape = (groups, 64) if along == 1 else (64, groups)
    count = np.zeros(shape, int)
    sizes = []
    for part in parts_of(shape, along):
        count[part] += 1
        sizes.append(count[part].size)
    np.testing.assert_array_equal(count, 1)
    assert max(sizes) <= 2**16
    assert max(sizes) - min(sizes) <= 64  # none is left alone


@pytest.mark.parametrize("along", [0, 1])
def test_groups_come_out_alike_alone_and_in_parts(along):
    m = np.random.default_rng(0).standard_normal((64, 64 * 50)).astype(np.float32)
    m = m if along == 0 else m.reshape(-1, 64)
    whole = minmax_encode(m, along, 4, "float16")
    split = in_parts(lambda m: minmax_encode(m, along, 4, "float16"), along, m)
    for a, b in zip(whole, split, strict=True):
        np.testing.assert_array_equal(a, b)


# --- which numbers share a scale ------------------------------------------------------
def shares_a_scale(name, shape, at):
    """Where else the decoded tensor changes if the number at `at` becomes huge."""
    form = with_dtype(name, "float32")
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    before = form.decode(form.encode(x), shape)
    x[at] = 1000
    after = form.decode(form.encode(x), shape)
    return set(map(tuple, np.argwhere(before != after)))


def test_quanto_axis_0_means_runs_of_channels_of_a_token():
    hit = shares_a_scale("hf:quanto-int4-axis0", (2, 3, 128), (1, 2, 70))
    assert hit <= {(1, 2, d) for d in range(64, 128)}
    assert len(hit) > 60


def test_quanto_axis_minus_1_means_tokens_of_a_channel_across_heads():
    hit = shares_a_scale("hf:quanto-int4-axis-1", (4, 48, 5), (1, 47, 3))
    flat = {48 * h + t for h, t, d in hit}
    assert {d for _, _, d in hit} == {3}
    assert min(flat) >= 64  # tokens 64..127 of the flattened (head, token): heads 1, 2
    assert max(flat) < 128
    assert {h for h, _, _ in hit} == {1, 2}


def test_hqq_axis_0_groups_are_strided():
    shape = (2, 3, 64)
    form = replace(with_dtype("hf:hqq-int4-axis0", "float32"), optimize=False)
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    before = form.decode(form.encode(x), shape).ravel()
    x.ravel()[7] = 1000
    changed = np.flatnonzero(before != form.decode(form.encode(x), shape).ravel())
    assert set(changed % (2 * 3 * 64 // 64)) == {7 % 6}
    assert len(changed) > 60


def test_axis_0_of_quanto_is_our_per_token_scheme():
    form = with_dtype("hf:quanto-int4-axis0", "float32")
    x = uneven((3, 37, 128))
    qt = quantize(x, replace(form.scheme, scale_dtype="float32"))
    x_hat = form.decode(form.encode(x), x.shape)
    np.testing.assert_allclose(x_hat, qt.dequantize(), rtol=1e-5, atol=1e-5)


def test_axis_minus_1_of_quanto_is_our_per_channel_scheme():
    form = with_dtype("hf:quanto-int4-axis-1", "float32")
    x = uneven((3, 128, 20))
    qt = quantize(x, replace(form.scheme, scale_dtype="float32"))
    x_hat = form.decode(form.encode(x), x.shape)
    np.testing.assert_allclose(x_hat, qt.dequantize(), rtol=1e-5, atol=1e-5)


def test_refinement_lowers_the_p_norm_of_the_error():
    x = np.random.default_rng(3).standard_cauchy((1, 4, 64)).astype(np.float32)
    refined = with_dtype("hf:hqq-int2-axis1", "float32")
    plain = replace(refined, optimize=False)
    size = [
        np.mean(np.abs(f.decode(f.encode(x), x.shape) - x) ** 0.7)
        for f in (refined, plain)
    ]
    assert size[0] < size[1]


# --- hazards --------------------------------------------------------------------------
def test_a_constant_group_beside_others_is_guarded():
    form = FORMATS["hf:quanto-int4-axis0"]
    x = np.random.default_rng(0).standard_normal((1, 4, 64)).astype(np.float16)
    x[0, 2] = 0.7
    x_hat = form.decode(form.encode(x), x.shape)
    assert np.isfinite(x_hat).all()
    np.testing.assert_array_equal(x_hat[0, 2], x[0, 2].astype(np.float32))


def test_hqq_zero_in_float16_loses_a_narrow_group_far_from_0():
    x = 50 + np.linspace(0, 0.02, 128, dtype=np.float32).reshape(1, 2, 64)
    width = np.ptp(x)
    error = {
        dtype: np.abs(
            (f := with_dtype("hf:hqq-int4-axis1", dtype)).decode(f.encode(x), x.shape)
            - x
        ).max()
        for dtype in ("float16", "float32")
    }
    assert error["float32"] < width / 16
    assert error["float16"] > width / 4


@pytest.mark.parametrize("bits", [4, 8])
def test_hqq_zero_stays_finite(bits):
    x = np.full((1, 8, 64), 900, np.float16)
    x[..., ::2] += np.float16(0.5)
    form = FORMATS[f"hf:hqq-int{bits}-axis1"]
    x_hat = form.decode(form.encode(x), x.shape)
    assert np.abs(x_hat - x).max() < 5


def test_fp8_scale_is_frozen_and_later_numbers_become_nan():
    first = np.array([[1, -2, 4.48]], np.float32)  # scale 0.01
    later = np.array([[4.48, 4.6, 4.65, -5]], np.float32)
    library = replace(with_dtype("hf:fp8", "float32"), clamp=False)
    scale = np.frombuffer(library.encode(first)[:4], "<f4")[0]
    assert scale == pytest.approx(0.01)

    def read(form):
        codes = form.encode_next(later, scale)
        return form.decode(scale.tobytes() + codes, later.shape)[0]

    np.testing.assert_allclose(read(library), [4.48, 4.48, np.nan, np.nan], rtol=1e-6)
    clamped = read(replace(library, clamp=True))
    np.testing.assert_allclose(clamped, [4.48, 4.48, 4.48, -4.48], rtol=1e-6)


def test_fp8_is_our_scheme():
    form = with_dtype("hf:fp8", "float32")
    x = uneven((2, 37, 20))
    np.testing.assert_allclose(
        form.decode(form.encode(x), x.shape),
        quantize(x, form.scheme).dequantize(),
        rtol=1e-6,
    )


# --- the cache ------------------------------------------------------------------------
def test_update_follows_the_rule():
    cache = RequantizingCache(FORMATS["hf:quanto-int4-axis0"], residual_length=4)
    x = uneven((2, 11, 64), dtype=np.float16).astype(np.float32)
    np.testing.assert_array_equal(cache.update(x[:, :5]), x[:, :5])  # exact prefill
    assert (cache.history().shape[1], cache.residual.shape[1]) == (5, 0)
    history = cache.history()
    for t in (5, 6, 7):
        seen = cache.update(x[:, t : t + 1])
        np.testing.assert_array_equal(seen[:, :5], history)
        np.testing.assert_array_equal(seen[:, 5:], x[:, 5 : t + 1])
    seen = cache.update(x[:, 8:9])  # the fourth: all nine tokens are quantized
    np.testing.assert_array_equal(seen[:, 5:], x[:, 5:9])
    assert (cache.history().shape[1], cache.residual.shape[1]) == (9, 0)
    form = cache.format
    want = form.decode(form.encode(seen), seen.shape)
    np.testing.assert_array_equal(cache.history(), want)


def drift(name, x, first=64, flushes=20):
    """NMSE of the first tokens after one quantization and after `flushes` more."""
    cache = RequantizingCache(with_dtype(name, "float16"), residual_length=3)
    cache.update(x[:, :first])
    once = nmse(x[:, :first], cache.history()[:, :first])
    for i in range(flushes):
        cache.update(x[:, first + 3 * i : first + 3 * i + 3])
    assert cache.flushes == flushes + 1
    return once, nmse(x[:, :first], cache.history()[:, :first])


def test_requantization_drifts_where_groups_shift():
    x = np.random.default_rng(1).standard_normal((64, 128, 8)).astype(np.float16)
    once, often = drift("hf:quanto-int4-axis-1", x)
    assert often > 3 * once


def test_requantization_of_unchanged_groups_hardly_drifts():
    x = np.random.default_rng(1).standard_normal((2, 128, 64)).astype(np.float16)
    once, often = drift("hf:quanto-int4-axis0", x)
    assert often == pytest.approx(once, rel=0.01)


def test_strided_groups_drift_on_real_keys():
    k = real_kv().k
    cache = RequantizingCache(FORMATS["hf:hqq-int4-axis0"], residual_length=64)
    errors = []
    for start in range(0, 512, 64):
        cache.update(k[:, start : start + 64])
        errors.append(nmse(k[:, :64], cache.history()[:, :64]))
    assert cache.flushes == 8
    assert np.all(np.diff(errors) > 0.7 * errors[0])  # every flush adds an error
    assert errors[-1] > 6 * errors[0]


def test_kvcache_quantizes_once():
    x = np.random.default_rng(1).standard_normal((2, 128, 64)).astype(np.float16)
    scheme = Scheme(4, "token", 64, "asymmetric")
    cache = KVCache(Policy(scheme, scheme, residual=3))
    cache.append(x[None, :, :64], x[None, :, :64])
    before = cache.keys()[..., :61, :]
    for t in range(64, 128):
        cache.append(x[None, :, t : t + 1], x[None, :, t : t + 1])
    np.testing.assert_array_equal(cache.keys()[..., :61, :], before)


# --- errors ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("hf:quanto-int4-axis0", (3, 5, 20), "300 numbers; valid: multiples of 64"),
        ("hf:quanto-int2-axis-1", (3, 5, 64), "15 tokens.* valid: multiples of 64"),
        ("hf:hqq-int4-axis1", (1, 3, 64), "3 rows of groups; valid: multiples of 2"),
        ("hf:hqq-int8-axis0", (3, 5, 20), "300 numbers; valid: multiples of 64"),
    ],
)
def test_shapes_that_the_library_refuses(name, shape, message):
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        FORMATS[name].encode(np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=message):
        FORMATS[name].nbytes(shape)


def test_numbers_and_dtypes_that_do_not_fit():
    form = FORMATS["hf:quanto-int4-axis0"]
    with pytest.raises(ValueError, match="float16 holds numbers up to 65504"):
        form.encode(np.full((1, 1, 64), 7e4, np.float32))
    wide = np.full((1, 1, 64), 4e4, np.float32)
    wide[..., 0] = -4e4
    with pytest.raises(ValueError, match="range of a group does not fit float16"):
        form.encode(wide)
    assert np.isfinite(with_dtype(form.name, "bfloat16").encode(wide) and 1)
    with pytest.raises(ValueError, match="dtype='float64'; valid: float16"):
        with_dtype(form.name, "float64")
    with pytest.raises(ValueError, match="100 bytes; a tensor of shape"):
        form.decode(bytes(100), (1, 2, 64))
    with pytest.raises(ValueError, match="group=0; valid"):
        replace(form, group=0)


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_decode_without_a_warning(name):
    form = FORMATS[name]
    shape = (2, 64, 64)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, form.nbytes(shape), dtype=np.uint8).tobytes()
    assert form.decode(data, shape).shape == shape


# --- the real packages ----------------------------------------------------------------
SHAPES = [(1, 2, 48, 64), (2, 3, 64, 20)]


def torch_tensor(shape, dtype):
    """Numbers without a constant group, as a torch tensor and as float32."""
    torch = pytest.importorskip("torch", reason="compares with a real torch package")
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[..., 1] *= 20
    x[..., 2] += 7
    tensor = torch.from_numpy(x).to(getattr(torch, dtype))
    return tensor, tensor.float().numpy()


def numbers_of(form, data, shape):
    tail = np.frombuffer(data[form.packed_bytes(shape) :], np.uint8)
    return [a.ravel() for a in form.numbers(tail)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("bits", [2, 4])
def test_equal_to_optimum_quanto(bits, axis, dtype, shape):
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    if axis == -1 and math.prod(shape[:-1]) % 64:
        pytest.skip("quanto refuses this shape, as we do")
    tensor, x = torch_tensor(shape, dtype)
    kind = {2: quanto.qint2, 4: quanto.qint4}[bits]
    scale, shift = quanto.MaxOptimizer()(tensor, kind, axis, 64)
    theirs = quanto.quantize_weight(tensor, kind, axis, scale, shift, 64)
    form = with_dtype(f"hf:quanto-int{bits}-axis{axis}", dtype)
    ours = form.encode(x)
    assert ours[: form.packed_bytes(shape)] == theirs._data._data.numpy().tobytes()
    for a, b in zip(numbers_of(form, ours, shape), (scale, shift), strict=True):
        np.testing.assert_array_equal(a, b.float().numpy().ravel())
    want = theirs.dequantize().float().numpy()
    np.testing.assert_array_equal(form.decode(ours, shape), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_hqq(bits, axis, dtype, shape):
    hqq = pytest.importorskip("hqq.core.quantize", reason="needs hqq")
    tensor, x = torch_tensor(shape, dtype)
    options = dict(nbits=bits, axis=axis, group_size=64, device="cpu")
    W, meta = hqq.Quantizer.quantize(tensor, compute_dtype=tensor.dtype, **options)
    form = with_dtype(f"hf:hqq-int{bits}-axis{axis}", dtype)
    ours = form.encode(x)
    packed = form.packed_bytes(shape)
    a, b = (np.frombuffer(d, np.uint8) for d in (ours[:packed], W.numpy().tobytes()))
    assert np.mean(a != b) < 1e-3  # the order of a mean can move a code
    meta |= {k: meta[k].to(tensor.dtype) for k in ("scale", "zero")}
    meta |= {"compute_dtype": tensor.dtype}
    # hqq's 3-bit decode on axis 1 counts rows as if the tensor had two axes.
    meta["shape"] = tensor.reshape(-1, shape[-1]).shape
    stored = [cast(meta[k].float().numpy(), dtype).tobytes() for k in ("scale", "zero")]
    ours = form.decode(W.numpy().tobytes() + b"".join(stored), shape)
    theirs = hqq.Quantizer.dequantize(W, meta).float().numpy().reshape(shape)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("backend", ["quanto", "fp8"])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_the_cache_of_transformers(backend):
    utils = pytest.importorskip("transformers.cache_utils", reason="needs transformers")
    torch = pytest.importorskip("torch", reason="needs torch")
    if backend == "quanto":
        pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
        theirs = utils.QuantoQuantizedLayer(4, 0, 0, 64, residual_length=5)
        ours = RequantizingCache(FORMATS["hf:quanto-int4-axis0"], residual_length=5)
    else:
        theirs = utils.Fp8QuantizedLayer()
        form = replace(FORMATS["hf:fp8"], clamp=False)
    tensor, x = torch_tensor((1, 2, 48, 64), "float16")
    tensor[..., 30:, :] *= 3  # beyond the frozen scale of the first 20 tokens
    x = tensor.float().numpy()
    for start, stop in [(0, 20), *((t, t + 1) for t in range(20, 48))]:
        new = tensor[..., start:stop, :]
        seen = theirs.update(new, new)[0].float().numpy()
        if backend == "quanto":
            np.testing.assert_array_equal(ours.update(x[..., start:stop, :]), seen)
    if backend == "fp8":
        assert torch.isnan(torch.from_numpy(seen)).any()
        first = form.encode(x[..., :20, :])
        rest = form.encode_next(x[..., 20:, :], np.frombuffer(first[:4], "<f4")[0])
        scale = first[:4]
        pieces = [(first[4:], (1, 2, 20, 64)), (rest, (1, 2, 28, 64))]
        got = [form.decode(scale + codes, shape) for codes, shape in pieces]
        np.testing.assert_array_equal(np.concatenate(got, axis=-2), seen)
