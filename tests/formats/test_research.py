"""Methods of papers: golden bytes, their equations and bounds, rows on real data.

The golden words were written by the functions of KIVI 876b4d2 and FlexLLMGen 004ffef on
float32 tensors.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from plain import uneven

from kvq.attention import attention
from kvq.formats.research import FORMATS, SETTINGS, measure
from kvq.formats.research_outliers import (
    Gear,
    Nuq,
    PolarPairs,
    from_rows,
    low_rank,
    mean_over_rope_pairs,
    sensitivity,
    split_outliers,
    to_rows,
    weighted_kmeans,
)
from kvq.formats.research_rotation import (
    PolarAngles,
    Qjl,
    TurboQuant,
    TurboQuantProduct,
    lloyd,
    qjl_variance,
    random_rotation,
    sphere_codebook,
)
from kvq.metrics import nmse
from kvq.samples import Sample, real_kv, synthetic_kv
from kvq.scheme import PRESETS, Scheme
from kvq.tensor import quantize
from kvq.transforms import rope


def ramp(*shape):
    i = np.arange(math.prod(shape))
    x = ((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07
    return x.astype(np.float32).reshape(shape)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parts(form, x):
    """(codes in hex, scales, offsets) of x."""
    data = form.encode(x)
    end = form.packed_bytes(x.shape)
    scale, offset = np.frombuffer(data[end:], "<f4").reshape(2, -1)
    return data[:end].hex(), scale, offset


# --- golden bytes ---------------------------------------------------------------------
def test_kivi_876b4d2_keys_2_bits():
    form = replace(FORMATS["kivi:key-2"], dtype="float32")
    assert parts(form, ramp(1, 1, 64, 8))[0] == (
        "d872d87676d872d818b61cb6b61cb61d2d872d86cb61cb6161db61cbd862d872d872d86262d872d8"
        "1cb61db6b618b6182d872d87db61cb61618b61cbd872d876d872d87272d876d81cb618b6b61cb61c"
        "6d876d878b61cb6161cb61dbd872d862d876d87272d862d81cb61cb6b61db61c2d862d87cb61db61"
        "61cb618bd872d872"
    )


def test_kivi_876b4d2_values():
    x = ramp(1, 1, 1, 64)
    want = {
        2: ("981d668bd96287d962b6d86176982d76", [2.7183334827, 2.6116666794]),
        4: (
            "90b3d5174a5b8ea2c4f6285b7d91c3e5183a6c9fb2d407395c7ea1c4f6284a7d",
            [0.5436667204, 0.5223333240],
        ),
    }
    for bits, (words, scales) in want.items():
        form = replace(FORMATS[f"kivi:value-{bits}"], dtype="float32")
        codes, scale, low = parts(form, x)
        assert codes == words
        np.testing.assert_array_equal(scale, np.float32(scales))
        assert low.tolist() == [-3.875, -3.75]


def test_flexllmgen_004ffef_int4():
    form = replace(FORMATS["flexgen:int4"], dtype="float32")
    codes, scale, low = parts(form, ramp(1, 64))
    assert codes == "093b5d71a4b5e82a4c6f82b5d7193c5e82a3c6f92a4d7093b5d71a4c6e82a4d7"
    assert scale == np.float32(1.8393621444702148)
    assert low == -3.875


# --- the formats ----------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stores_the_levels_of_its_scheme(name):
    form = replace(FORMATS[name], dtype="float32")
    x = uneven((2, 3, 96, 64))
    x_hat = form.decode(form.encode(x), x.shape)
    qt = quantize(x, replace(form.scheme, scale_dtype="float32"))
    different = np.abs(x_hat - qt.dequantize()) > 1e-4
    assert different.mean() < 1e-3  # a code moves where x lies between two levels
    bits = FORMATS[name].bits_per_element(x.shape)
    assert bits == form.scheme.bits_per_element(96, 64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_half_precision_is_little_worse(name, dtype):
    x = normal(2, 96, 64)
    full, half = (replace(FORMATS[name], dtype=d) for d in ("float32", dtype))
    error = [nmse(x, f.decode(f.encode(x), x.shape)) for f in (full, half)]
    assert error[1] == pytest.approx(error[0], rel=0.05)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, -2.5, 30000.0])
def test_a_constant_tensor_is_exact(name, value):
    x = np.full((2, 64, 128), value, np.float16)
    form = FORMATS[name]
    np.testing.assert_array_equal(form.decode(form.encode(x), x.shape), x)


def test_flexgen_inverse_scale_stays_finite_in_float16():
    x = np.zeros((1, 2, 64), np.float32)
    x[..., 1] = 1e-5  # 15 / 1e-5 is beyond float16
    form = FORMATS["flexgen:int4"]
    x_hat = form.decode(form.encode(x), x.shape)
    np.testing.assert_allclose(x_hat, x, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("kivi:key-2", (2, 40, 64), "multiples of 32 tokens"),
        ("kivi:value-4", (2, 64, 40), "multiples of 32 channels"),
        ("flexgen:int4", (2, 64, 96), "96 channels; valid: multiples of 64"),
    ],
)
def test_shapes_that_do_not_fit(name, shape, message):
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        FORMATS[name].encode(np.ones(shape, np.float32))


# --- codebooks ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("D", "want"),
    [
        (128, [0.360889, 0.116000, 0.033966, 0.009315]),
        (64, [0.358387, 0.114526, 0.033391, 0.009132]),
    ],
)
def test_sphere_codebook_reaches_the_known_error(D, want):
    got = [sphere_codebook(D, bits)[1] for bits in (1, 2, 3, 4)]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_lloyd_of_a_uniform_density_is_equally_spaced():
    levels, mse = lloyd(np.ones_like, 2, 6, 3)
    np.testing.assert_allclose(levels, 2.25 + 0.5 * np.arange(8), atol=1e-6)
    assert mse == pytest.approx(0.5**2 / 12, rel=1e-3)


def test_random_rotation_is_orthogonal():
    R = random_rotation(20, seed=3)
    np.testing.assert_allclose(R @ R.T, np.eye(20), atol=1e-5)
    assert np.abs(R - random_rotation(20, seed=4)).max() > 0.1


# --- QJL ------------------------------------------------------------------------------
def qjl_estimates(q, k, m, seeds):
    """<q, k> estimated with many sketches: (seeds,)."""
    method = [Qjl(m, seed) for seed in range(seeds)]
    return np.array([a.scores(q, a.encode(k))[0, 0, 0] for a in method])


def test_qjl_is_unbiased_with_the_known_variance():
    q, k = normal(1, 1, 12, seed=1), normal(1, 1, 12, seed=2)
    k[..., 3] += 4
    m, n = 24, 3000
    estimates = qjl_estimates(q, k, m, n)
    variance = qjl_variance(q, k, m).item()
    exact = np.sum(q * k)
    assert abs(estimates.mean() - exact) < 4 * math.sqrt(variance / n)
    assert estimates.var() == pytest.approx(variance, rel=0.12)  # 4 sqrt(2 / n)


def test_qjl_scores_are_those_of_the_decoded_keys():
    q, k = normal(2, 5, 20, seed=1), uneven((2, 37, 20))
    method = Qjl(m=24)
    stored = method.encode(k)
    k_hat = method.decode(stored, k.shape)
    np.testing.assert_allclose(
        method.scores(q, stored), q @ k_hat.swapaxes(1, 2), rtol=1e-3, atol=1e-3
    )
    assert method.bits_per_element(k) == 24 / 20 + 16 / 20


# --- TurboQuant -----------------------------------------------------------------------
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turboquant_reaches_the_error_of_its_codebook(bits):
    x = normal(2, 700, 64) * np.float32(30)
    x[1] += 100
    method = TurboQuant(bits, seed=5)
    x_hat = method.decode(method.encode(x), x.shape)
    error = np.sum((x - x_hat) ** 2, axis=-1) / np.sum(x * x, axis=-1)
    want = sphere_codebook(64, bits)[1]
    assert error[0].mean() == pytest.approx(want, rel=0.03)
    assert method.bits_per_element(x) == bits + 16 / 64


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turboquant_bound_holds_for_the_worst_vectors(bits):
    D = 32
    x = np.stack([np.eye(D)[3], np.ones(D), np.arange(D) - 9.0])[None]
    x = x.astype(np.float32)
    errors = []
    for seed in range(200):
        method = TurboQuant(bits, seed)
        x_hat = method.decode(method.encode(x), x.shape)
        errors.append(np.sum((x - x_hat) ** 2, axis=-1) / np.sum(x * x, axis=-1))
    bound = math.sqrt(3) * math.pi / 2 * 4.0**-bits
    assert np.mean(errors, axis=0).max() < bound
    assert np.mean(errors) > 4.0**-bits  # no quantizer does better


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_product_form_is_unbiased_within_its_bound(bits):
    D, n = 32, 1500
    q, x = normal(D, seed=1), normal(1, 1, D, seed=2)
    x[..., 3] += 8
    estimates = []
    for seed in range(0, 2 * n, 2):  # the sketch takes the odd seeds
        method = TurboQuantProduct(bits, seed)
        estimates.append(method.decode(method.encode(x), x.shape)[0, 0] @ q)
    error = np.array(estimates) - x[0, 0] @ q
    mean_square = np.mean(error**2)
    bound = math.sqrt(3) * math.pi**2 * np.sum(q * q) * np.sum(x * x) / D * 4.0**-bits
    assert mean_square < bound
    assert abs(error.mean()) < 4 * math.sqrt(mean_square / n)


def test_turboquant_mse_form_is_biased():
    x = normal(1, 4000, 32)
    method = TurboQuant(1)
    x_hat = method.decode(method.encode(x), x.shape)
    shrink = np.sum(x * x_hat) / np.sum(x * x)
    assert shrink == pytest.approx(1 - sphere_codebook(32, 1)[1], rel=0.02)


def test_the_preset_is_nearly_turboquant():
    sample = real_kv()
    method = TurboQuant(4)
    scheme = PRESETS["turboquant-4"].value
    ours = nmse(sample.v, quantize(sample.v, scheme).dequantize())
    theirs = nmse(sample.v, method.decode(method.encode(sample.v), sample.v.shape))
    assert ours == pytest.approx(theirs, rel=0.1)
    assert scheme.bits_per_element(512, 64) == method.bits_per_element(sample.v)


@pytest.mark.parametrize(
    "method", [Qjl(24), TurboQuant(2), TurboQuantProduct(2), PolarAngles()]
)
def test_zeros_and_scales_pass_through(method):
    x = normal(2, 7, 32)
    x[1, 3] = 0
    x_hat = method.decode(method.encode(x), x.shape)
    assert x_hat.dtype == np.float32
    np.testing.assert_array_equal(x_hat[1, 3], 0)
    larger = method.decode(method.encode(64 * x), x.shape)
    np.testing.assert_allclose(larger, 64 * x_hat, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "bits", "valid"),
    [(TurboQuant, 0, "1..8"), (TurboQuantProduct, 1, "2..8")],
)
def test_impossible_bits(method, bits, valid):
    with pytest.raises(ValueError, match=f"bits={bits}; valid: {valid}"):
        method(bits)


# --- PolarQuant -----------------------------------------------------------------------
def test_polar_angles_store_3_875_bits():
    x = uneven((2, 37, 32))
    assert PolarAngles().bits_per_element(x) == pytest.approx(3.875, abs=0.02)
    with pytest.raises(ValueError, match="D=20; valid: multiples of 16"):
        PolarAngles().encode(normal(1, 3, 20))


def test_polar_angles_need_no_scale_and_ignore_outliers():
    error = []
    for x in (normal(2, 300, 32), uneven((2, 300, 32))):
        method = PolarAngles()
        error.append(nmse(x, method.decode(method.encode(x), x.shape)))
    assert error[0] == pytest.approx(0.03, rel=0.2)
    assert error[1] < 1.5 * error[0]


def test_more_angle_bits_give_x_back():
    x = normal(2, 5, 32)
    method = PolarAngles(angle_bits=(6, 5, 5, 5))
    assert nmse(x, method.decode(method.encode(x), x.shape)) < 2e-3


def test_polar_pairs_err_by_half_a_step_of_each():
    x = uneven((2, 75, 20))
    method = PolarPairs(radius_bits=4, angle_bits=3, group=32)
    stored = method.encode(x)
    x_hat = method.decode(stored, x.shape)
    a, b = x[..., :10] + 1j * x[..., 10:], x_hat[..., :10] + 1j * x_hat[..., 10:]
    step_r, step_t = (
        np.repeat(stored[n].astype(np.float32), 32, axis=1)[:, :75]
        for n in ("rho_step", "theta_step")
    )
    slack = 2e-3  # minima and steps are float16
    limit = step_r * (0.5 + 15 * slack) + slack * np.abs(a)
    np.testing.assert_array_less(np.abs(np.abs(a) - np.abs(b)), limit + 1e-6)
    turn = np.abs(np.angle(a / b))
    np.testing.assert_array_less(turn, step_t * (0.5 + 8 * slack) + 4 * slack)
    assert sum(s.nbytes for s in stored.values()) == 2 * 75 * 9 + 4 * 2 * 3 * 10 * 2


# --- KVQuant --------------------------------------------------------------------------
def test_rows_come_back():
    x = uneven((3, 7, 10))
    for per, shape in (("channel", (30, 7)), ("token", (7, 30))):
        rows = to_rows(x, per)
        assert rows.shape == shape
        np.testing.assert_array_equal(from_rows(rows, per, x.shape), x)
    np.testing.assert_array_equal(to_rows(x, "channel")[10], x[1, :, 0])
    np.testing.assert_array_equal(to_rows(x, "token")[4, 10:20], x[1, 4])


def test_split_outliers_takes_the_farthest():
    rows = np.float32([[5, 5.5, 90, 4.5, -70], [0, 1, 2, 3, 4]])
    rest, positions, values = split_outliers(rows, 0.4)
    np.testing.assert_array_equal(positions[0], [2, 4])
    np.testing.assert_array_equal(values[0], [90, -70])
    np.testing.assert_allclose(rest[0], [5, 5.5, 5, 4.5, 5])
    assert set(positions[1]) == {0, 4}


def test_weighted_kmeans_finds_separate_clusters():
    x = np.concatenate([np.full(3, -1.0), np.full(50, 0.25), [0.5, 0.9]])
    w = np.ones_like(x)
    w[-1] = 0  # counts nothing
    w[-2] = 50
    np.testing.assert_allclose(weighted_kmeans(x[::-1], w[::-1], 2), [-1, 0.375])


def test_fitted_levels_are_weighted_means_and_beat_equal_steps():
    x, F = uneven((2, 200, 5)), np.random.default_rng(1).exponential(size=(2, 200, 5))
    fitted = Nuq.fit(x, F, 3, "channel")
    equal = replace(fitted, levels=np.linspace(-1, 1, 8, dtype=np.float32))
    error = [
        np.sum(F * (m.decode(m.encode(x), x.shape) - x) ** 2) for m in (fitted, equal)
    ]
    assert error[0] < 0.9 * error[1]


@pytest.mark.parametrize("per", ["channel", "token"])
def test_outliers_come_back_and_are_counted(per):
    x = normal(2, 200, 30)
    x[0, 17, 3], x[1, 60, 29] = 100, -100
    methods = [Nuq.fit(x, np.ones(x.shape), 3, per, share) for share in (0, 0.02)]
    dense, sparse = (m.decode(m.encode(x), x.shape) for m in methods)
    assert sparse[0, 17, 3] == 100
    assert sparse[1, 60, 29] == -100
    assert nmse(x, sparse) < nmse(x, dense) / 1.5
    rows, n = (60, 200) if per == "channel" else (200, 60)
    more = methods[1].bits_per_element(x) - methods[0].bits_per_element(x)
    assert more == pytest.approx(32 * round(0.02 * n) / n)
    assert methods[0].bits_per_element(x) == pytest.approx(
        8 * (rows * math.ceil(3 * n / 8) + 4 * rows) / x.size
    )


def test_sensitivity_is_the_squared_change_of_the_output():
    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal(s) for s in ((2, 9, 6), (2, 9, 5), (4, 3, 6)))
    F_k, F_v = sensitivity(Sample(k, v, q, "test"))
    o = attention(q, k, v, causal=True)
    for at in ((1, 4, 2), (0, 7, 5), (1, 8, 0)):
        step = np.zeros(k.shape)
        step[at] = 1e-5
        change = (attention(q, k + step, v, causal=True) - o) / 1e-5
        assert F_k[at] == pytest.approx(np.sum(change**2), rel=1e-3)
    for at in ((1, 4, 2), (0, 0, 4)):
        step = np.zeros(v.shape)
        step[at] = 1.0
        change = attention(q, k, v + step, causal=True) - o
        assert F_v[at] == pytest.approx(np.sum(change**2))


def test_rope_keeps_the_mean_sensitivity_of_a_pair():
    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal(s) for s in ((1, 9, 6), (1, 9, 5), (2, 9, 6)))
    F_k, _ = sensitivity(Sample(k, v, q, "test"))
    o = attention(q, k, v, causal=True)
    for channel in (1, 4):  # a pair
        step = np.zeros(k.shape)
        step[0, 5, channel] = 1e-5
        turned = rope(step, np.arange(9), base=100.0)
        change = (attention(q, k + turned, v, causal=True) - o) / 1e-5
        F_k[0, 5, 1] -= np.sum(change**2)
    assert mean_over_rope_pairs(F_k)[0, 5, 4] == pytest.approx(0, abs=1e-5)


def test_an_outlier_beyond_float16_saturates():
    x = normal(1, 100, 4)
    x[0, 3, 1] = 1e5
    method = Nuq.fit(x, np.ones(x.shape), 2, "channel", 0.02)
    assert method.decode(method.encode(x), x.shape)[0, 3, 1] == 65504


def test_a_constant_row_comes_back():
    x = uneven((2, 40, 5))  # channel 3 is constant
    method = Nuq.fit(x, np.ones(x.shape), 2, "channel")
    x_hat = method.decode(method.encode(x), x.shape)
    np.testing.assert_array_equal(x_hat[0, :, 3], x[0, :, 3])


# --- GEAR -----------------------------------------------------------------------------
def test_power_iteration_finds_the_largest_singular_values():
    E = normal(2, 40, 3) @ normal(2, 3, 12) + np.float32(0.01) * normal(2, 40, 12)
    A, B = low_rank(E, 3, 4)
    np.testing.assert_allclose(A.swapaxes(1, 2) @ A, [np.eye(3)] * 2, atol=1e-5)
    best = np.sum(np.linalg.svd(E, compute_uv=False)[:, 3:] ** 2)
    assert np.sum((E - A @ B.swapaxes(1, 2)) ** 2) == pytest.approx(best, rel=1e-3)


def test_gear_adds_to_its_backbone():
    x = uneven((2, 96, 20))
    scheme = Scheme(2, "token", 10, "asymmetric")
    method = Gear(scheme, sparse=0.03, rank=2)
    error = nmse(x, method.decode(method.encode(x), x.shape))
    backbone = nmse(x, quantize(x, scheme).dequantize())
    less = nmse(x, (m := Gear(scheme, 0.03, 1)).decode(m.encode(x), x.shape))
    assert error < less < backbone
    sparse = 32 * round(0.03 * 96) / 96
    assert method.bits_per_element(x) == pytest.approx(
        scheme.bits_per_element(96, 20) + sparse + 16 * 2 * (96 + 20) / (96 * 20)
    )


# --- the measured rows ----------------------------------------------------------------
@pytest.fixture(scope="module")
def rows():
    s = real_kv()
    return {
        row["method"]: row for row in measure(Sample(s.k, s.v, s.q[:, -16:], s.name))
    }


def test_every_method_has_a_row_on_real_data(rows):
    assert set(SETTINGS) < set(rows)
    for word in ("kvquant", "qjl", "turboquant", "polarquant", "gear"):
        assert any(name.startswith(word) for name in rows)
    for row in rows.values():
        assert 2 < row["bits_key"] < 9
        assert 0 < row["nmse_key"] < 1
        assert 0 < row["nmse_value"] < 1
        assert 0 < row["output_error"] < 1.5


def test_a_row_is_what_its_scheme_stores(rows):
    sample, policy = real_kv(), PRESETS["kivi-2"]
    k, v = quantize(sample.k, policy.key), quantize(sample.v, policy.value)
    row = rows["kivi-2"]
    assert (row["bits_key"], row["bits_value"]) == (3, 3)
    assert row["nmse_key"] == nmse(sample.k, k.dequantize())
    q = sample.q[:, -16:]
    o, o_hat = (
        attention(q, *kv, causal=True)
        for kv in ((sample.k, sample.v), (k.dequantize(), v.dequantize()))
    )
    want = np.linalg.norm(o_hat - o) / np.linalg.norm(o)
    assert row["output_error"] == pytest.approx(want)


def test_what_the_rows_show(rows):
    error = {name: row["output_error"] for name, row in rows.items()}
    # Residual signs cost more than they correct, at every size.
    for bits in (2, 3, 4):
        assert error[f"turboquant-{bits} mse"] < error[f"turboquant-{bits} product"]
    # GEAR improves on its backbone, at 1.75 bits more.
    assert error["gear-2"] < error["kivi-2"]
    assert error["gear-4"] < error["kivi-4"]
    # A rotation helps scales per token; scales per channel need none.
    assert error["kivi-4"] < error["quarot-4"] < error["atom-4"]
    for bits in (2, 3, 4):
        assert error[f"kvquant-nuq{bits} 1%"] < error[f"kvquant-nuq{bits}"]


def test_measure_needs_queries():
    s = synthetic_kv(tokens=16)
    with pytest.raises(ValueError, match="has no queries"):
        measure(Sample(s.k, s.v, None, "no queries"))


def test_measure_takes_other_shapes():
    s = synthetic_kv(kv_heads=2, tokens=75, head_dim=32, q_heads=4, queries=5)
    assert len(measure(s)) > 20
