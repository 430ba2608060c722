"""vLLM's formats: golden bytes, plain loops beside them, hazards."""

import struct

import ml_dtypes
import numpy as np
import pytest
from plain import uneven

from kvq.formats import vllm
from kvq.formats.minifloat import E4M3, calibrated_scale
from kvq.formats.rounding import bucket
from kvq.formats.vllm_rotated import (
    int4_signs,
    octave_pack,
    octave_signs,
    octave_unpack,
    turboquant_levels,
    walsh,
)
from kvq.transforms import hadamard_matrix

FORMATS = vllm.FORMATS
PAIRS = {n: f for n, f in FORMATS.items() if "_mla" not in n}
SLOTS = {n: f for n, f in PAIRS.items() if "nvfp4" not in n}
RECORDS = {n: f for n, f in FORMATS.items() if "_mla" in n}

# k = ramp(64), v reversed; the slot, or its first half. Computed from the equations;
# those of d = 128 below were produced by vLLM's own CPU references.
GOLDEN_64 = {
    "int8_per_token_head": (
        "8d18b642e060fe9c28c646e4700eac2cca56f47f13b13cda65f99722c04bdf6a08a631c550ee7917"
        "ab36d45ffd911cba45e36402a02bc94ae87311af30ce59f728140a3d"
    ),
    "fp8_per_token_head": (
        "fd6bf876ee7bccfb71f578ec7c64f972f479e37e68f975f07bddfc6ff678ef7c5efa73f579e87d6a"
        "f974f27ad2fc6cf777ed7b4ffb72f478eb7d67f973f37adf49921c3c"
    ),
    "int4_per_token_head": (
        "76fd565a7c85474c78c87a596acabcf4ba7c799b9580c87a7ac688b697a6749ba9aaca40"
    ),
    "turboquant_4bit_nc": (
        "7a864877884478b4b4874472874b82bb27bb88b444270b77874bd7440488bbd7a44cd7a4826e4c1a"
        "d7b593704d2af9c6a3825e3c19d7b5826f4c2ae8b5a4715d3b095a38c0c3"
    ),
    "turboquant_k3v4_nc": (
        "dd486da4c4a9ea28656315b64b4baad2526c63354b02d9cea44cd7a4826e4c1ad7b593704d2af9c6"
        "a3825e3c19d7b5826f4c2ae8b5a4715d3b095a38c0c3"
    ),
    "turboquant_3bit_nc": (
        "dd486da4c4a9ea28656315b64b4baad2526c63354b02d9cea44cb31a7e5533ab216635fcac865643"
        "cc6af8590dbf8a98d510a93cc0c3"
    ),
}
GOLDEN_128 = {
    "octave_k3v4": (
        "7296b1ec36a4b84b78adc555599bdcd7baa9bc7bb73a433e59c7d567b5748e6927ac81e694b51209"
        "a59264afe3cc88e07a34ff576c56f2b54481668a1695cd9898ad9a695a558ac47667d37e9447562a"
        "786ba468eba84ab411e9753d64a4464489996774a2b0a2bbd8cc5db78926888ba3d7f89571da0a8a"
        "8e423e4160420000"
    ),
    "octave_k3v3": (
        "7296b1ec36a4b84b78adc555599bdcd7baa9bc7bb73a433e59c7d567b5748e6927ac81e694b51209"
        "a59264afe3cc88e07a34ff576c56f2b53920af0190a611982fbfb95fec4d95ace05cbea650405f5e"
        "0c7a0a17c59f1c12703afc9fd8d06295b0bb80c12fe37dee8e423e411b410000"
    ),
    "octave_k3v3_compact": (
        "a10c85af90c7a8c8af67597f0cf4af704956f4b73b5d45fddab12f9258e7a25b727cfe57dc36e2b5"
        "84dbe282932369463920af0190a611982fbfb95fec4d95ace05cbea650405f5e0c7a0a17c59f1c12"
        "703afc9fd8d06295b0bb80c12fe37dee30411b41"
    ),
    "ultraquant_4bit": (
        "940bd00000dd005d5d00dd0f00d50f55d033003bbbd0f30000b350bbeb003350a0aad22222d2aaa5"
        "5aaafdf2222d7aea9939111bb1bf93c39993d1411b4bc9cc7f807a7b796e2fc7e7f5706c3e9fd7f5"
        "737b5d1fb7e6f4706d4fa7e7f6727c5e9fc7f6f3795d2fb7e6f5706c4e0fd7f6737a5e1fc7e7f479"
        "6d2fa7e7f5726c5e0fc7e6f37e7e7e7e"
    ),
}


def ramp(n):
    i = np.arange(n)
    return (((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07).astype(np.float16)[None]


def fmt(name):
    return FORMATS[f"vllm:{name}"]


# --- golden bytes ---------------------------------------------------------------------
@pytest.mark.parametrize("name", GOLDEN_64)
def test_vllm_0_33_0_slot_of_64_channels(name):
    golden = bytes.fromhex(GOLDEN_64[name])
    k = ramp(64)
    assert fmt(name).encode(k, k[:, ::-1])[: len(golden)] == golden


@pytest.mark.parametrize("name", GOLDEN_128)
def test_vllm_0_33_0_slot_of_128_channels(name):
    k = ramp(128)
    assert fmt(name).encode(k, k[:, ::-1]) == bytes.fromhex(GOLDEN_128[name])


def test_vllm_0_33_0_fp8_per_tensor():
    k = ramp(64)
    scale = calibrated_scale(k.max())
    assert scale == np.float32(0.00955636147)
    codes = vllm.fp8("e4m3", k_scale=scale, v_scale=1).encode(k, k)
    assert codes[:64].hex() == GOLDEN_64["fp8_per_token_head"][:128]
    assert codes[64:].hex().startswith("c835c241b94596c53bc042b7472fc33c")


@pytest.mark.parametrize(
    ("D", "bits", "levels"),
    [
        (64, 3, "3cfadcfb 3dc171fc 3e2bed53 3e899f54"),
        (128, 3, "3cb16317 3d88c955 3df3243d 3e42a09f"),
        (256, 3, "3c7adcfb 3d4171fc 3dabed53 3e099f54"),
        (
            64,
            4,
            "3c83828a 3d46b9ff 3da82948 3df1444a 3e20cd0c 3e4f16c0 3e846170 3eaec76e",
        ),
        (
            128,
            4,
            "3c39fbae 3d0c8559 3d6dd0e1 3daa99f2 3de3682b 3e126f17 3e3b36e7 3e772cc4",
        ),
        (
            256,
            4,
            "3c03828a 3cc6b9ff 3d282948 3d71444a 3da0cd0c 3dcf16c0 3e046170 3e2ec76e",
        ),
    ],
)
def test_vllm_0_33_0_turboquant_levels(D, bits, levels):
    expected = np.array([int(w, 16) for w in levels.split()], np.uint32)
    ours = turboquant_levels(bits, D)
    np.testing.assert_array_equal(ours[2 ** (bits - 1) :].view(np.uint32), expected)
    np.testing.assert_array_equal(ours, -ours[::-1])


def sign_word(signs):
    return sum(1 << i for i, s in enumerate(signs) if s < 0)


def test_vllm_0_33_0_signs():
    assert sign_word(int4_signs(128)) == 0x9480ABC759BBC2937F7FCA4E9A8CA6F2
    assert sign_word(int4_signs(64)) == 0x7F7FCA4E9A8CA6F2
    assert sign_word(octave_signs(64)) == 0x9E0D463582C270EB
    assert sign_word(octave_signs(128)) == 0x68C675E641D23DB19E0D463582C270EB


SLOT_BYTES = {  # of 128 channels
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "int8_per_token_head": 264,
    "fp8_per_token_head": 264,
    "int4_per_token_head": 136,
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "turboquant_k3v4_nc": 118,
    "turboquant_3bit_nc": 102,
    "octave_k3v4": 128,
    "octave_k3v3": 112,
    "octave_k3v3_compact": 100,
    "ultraquant_4bit": 136,
    "nvfp4": 144,
    "nvfp4_4over6": 144,
}


@pytest.mark.parametrize("name", SLOT_BYTES)
def test_bytes_of_a_token(name):
    k = uneven((3, 32, 128))
    data = fmt(name).encode(k, k)
    assert len(data) == 3 * 32 * SLOT_BYTES[name] == fmt(name).nbytes(k.shape)
    assert fmt(name).bits_per_element(k.shape) == 8 * SLOT_BYTES[name] / 256


def test_every_pair_format_is_checked_above():
    assert sorted(PAIRS) == sorted(f"vllm:{n}" for n in SLOT_BYTES)
    assert {f.version for f in FORMATS.values()} == {"vLLM 0.33.0"}


# --- what decoding gives --------------------------------------------------------------
# Largest |error| / max|x| of a token on Gaussian keys and values of 128 channels.
WORST = {  # of K, of V; with a power-of-two scale, ultraquant clips at 6 of up to 9.1
    "fp8_e4m3": (1 / 16, 1 / 16),
    "fp8_e5m2": (1 / 8, 1 / 8),
    "int8_per_token_head": (0.5 / 127, 0.5 / 127),
    "fp8_per_token_head": (1 / 16, 1 / 16),
    "int4_per_token_head": (0.25, 0.25),
    "turboquant_k8v4": (1 / 16, 1.02 / 15),
    "turboquant_4bit_nc": (0.2, 1.02 / 15),
    "turboquant_k3v4_nc": (0.4, 1.02 / 15),
    "turboquant_3bit_nc": (0.4, 1.02 / 7),
    "octave_k3v4": (0.4, 0.2),
    "octave_k3v3": (0.4, 0.4),
    "octave_k3v3_compact": (0.4, 0.4),
    "ultraquant_4bit": (0.34, 0.34),
    "nvfp4": (0.18, 0.18),
    "nvfp4_4over6": (0.18, 0.18),
}


@pytest.mark.parametrize("name", WORST)
def test_errors_stay_below_their_bounds(name):
    rng = np.random.default_rng(11)
    k, v = rng.standard_normal((2, 3, 21, 128))
    for x, y, bound in zip((k, v), roundtrip(name, k, v), WORST[name], strict=True):
        assert y.dtype == np.float32
        top = np.abs(x).max(axis=-1, keepdims=True)
        assert 0.1 * bound < (np.abs(x - y) / top).max() <= bound * 1.0001


def roundtrip(name, k, v):
    return fmt(name).decode(fmt(name).encode(k, v), k.shape)


@pytest.mark.parametrize("name", SLOT_BYTES)
@pytest.mark.parametrize("dims", [(64, 128), (256, 64)])
def test_values_may_have_another_width(name, dims):
    k, v = uneven((2, 5, dims[0])), uneven((2, 5, dims[1]), 1)
    kind = fmt(name)
    data = kind.encode(k, v)
    assert len(data) == kind.nbytes(k.shape, dims[1])
    k_hat, v_hat = kind.decode(data, k.shape, dims[1])
    assert k_hat.shape == k.shape
    assert v_hat.shape == v.shape
    np.testing.assert_array_equal(k_hat, roundtrip(name, k, k)[0])
    np.testing.assert_array_equal(v_hat, roundtrip(name, v, v)[1])


@pytest.mark.parametrize("name", SLOTS)
def test_a_token_is_stored_alone(name):
    k, v = uneven((3, 700, 128)), uneven((3, 700, 128), 1)
    kind = FORMATS[name]
    slots = kind.encode_slots(k, v)
    one = kind.encode_slots(k[2, 611], v[2, 611])
    np.testing.assert_array_equal(slots[2, 611], one)


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("dtype", ["float16", "float64", ml_dtypes.bfloat16])
def test_every_float_dtype_is_read(name, dtype):
    k = uneven((2, 3, 64)).astype(dtype)
    same = k.astype(np.float32)
    kind = FORMATS[name]
    if "int4" not in name:  # rounds the rotated vector to the dtype of the keys
        assert kind.encode(k, k) == kind.encode(same, same)
    k_hat, _ = kind.decode(kind.encode(k, k), k.shape)
    assert np.abs(k_hat - same).max() < np.abs(same).max()


def test_a_bucket_counts_midpoints_and_ties_by_rule():
    middle = np.float32([-2, -0.5, 0.25, 3])
    y = np.concatenate([middle, np.nextafter(middle, 9), np.nextafter(middle, -9)])
    for ties, side in (("up", "right"), ("down", "left")):
        count = bucket(y.reshape(3, 4), middle, ties)
        assert count.dtype == np.uint8
        np.testing.assert_array_equal(count.ravel(), np.searchsorted(middle, y, side))


# --- each format beside its equations, one number after the other ---------------------
def test_int8_per_token_head_number_by_number():
    x = uneven((2, 7, 20))
    codes = fmt("int8_per_token_head").encode_slots(x, x)
    for row, slot in zip(x.reshape(-1, 20), codes.reshape(-1, 48), strict=True):
        s = max(np.float32(np.abs(row).max()) / np.float32(127), np.float32(1e-6))
        inverse = np.float32(1) / s
        q = [
            int(np.float32(v) * inverse + np.float32(0.5 if v >= 0 else -0.5))
            for v in row
        ]
        assert slot[:20].view(np.int8).tolist() == q
        assert slot[20:24].tobytes() == struct.pack("<f", s)


def test_fp8_per_tensor_divides_and_clamps():
    x = uneven((2, 7, 20))
    for kind, dtype, top in (
        ("e4m3", ml_dtypes.float8_e4m3fn, 448),
        ("e5m2", ml_dtypes.float8_e5m2, 57344),
    ):
        slots = vllm.fp8(kind, k_scale=0.03, v_scale=1e-4).encode_slots(x, x)
        for part, scale in ((slots[..., :20], 0.03), (slots[..., 20:], 1e-4)):
            y = np.clip(x / np.float32(scale), -top, top)
            np.testing.assert_array_equal(part, y.astype(dtype).view(np.uint8))


def test_walsh_is_the_sylvester_matrix():
    x = uneven((3, 64)).astype(np.float64)
    expected = x @ hadamard_matrix(64) * 8
    np.testing.assert_allclose(walsh(x), expected, rtol=1e-5, atol=1e-4)


def test_int4_rotates_in_blocks_of_the_largest_power_of_two():
    x = uneven((1, 9, 96))  # 96 = 3 * 32
    signs = int4_signs(32)
    y = np.concatenate(
        [(x[..., i : i + 32] * signs) @ hadamard_matrix(32) for i in (0, 32, 64)], -1
    )
    y *= np.sqrt(32)
    low, high = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
    slots = fmt("int4_per_token_head").encode_slots(x, x)
    codes = np.stack([slots[..., :48] & 15, slots[..., :48] >> 4], -1).reshape(y.shape)
    word = np.ascontiguousarray(slots[..., 48:52]).view("<u4")
    s, zp = (word & ~np.uint32(15)).view(np.float32), (word & 15).astype(int)
    np.testing.assert_allclose(s, (high - low) / 15, rtol=1e-5)
    np.testing.assert_array_equal(zp, np.clip(np.rint(-low / s), 0, 15))
    inside = (low < 0) & (high > 0)
    y_hat = (codes - zp) * s
    assert (np.abs(y_hat - y) <= s * 1.01)[np.broadcast_to(inside, y.shape)].all()


def test_turboquant_keys_keep_their_norm():
    k = uneven((2, 9, 128))
    for name in ("turboquant_4bit_nc", "turboquant_3bit_nc"):
        k_hat, _ = roundtrip(name, k, k)
        norm = np.linalg.norm(k, axis=-1).astype(np.float16)
        np.testing.assert_allclose(np.linalg.norm(k_hat, axis=-1), norm, rtol=1e-5)


def test_octave_keeps_the_projection_on_the_vector():
    v = uneven((2, 9, 128))
    for name in ("octave_k3v4", "octave_k3v3"):
        _, v_hat = roundtrip(name, v, v)
        np.testing.assert_allclose((v * v_hat).sum(-1), (v * v).sum(-1), rtol=2e-3)


@pytest.mark.parametrize("rope_dim", [0, 64, 128, 192])
def test_octave_spends_four_bits_on_rope_channels(rope_dim):
    k = uneven((2, 5, 192))
    kind = vllm.octave("octave_k3v3", rope_dim)
    codes = rope_dim // 2 + (192 - rope_dim) * 3 // 8 + 192 * 3 // 8
    assert kind.slot_bytes(192) == -(-(codes + 2 * (3 + 1)) // 8) * 8
    k_hat, _ = kind.decode(kind.encode(k, k), k.shape)
    error = np.square(k - k_hat).reshape(-1, 192)
    if rope_dim in (64, 128):
        assert error[:, :rope_dim].mean() < 0.5 * error[:, rope_dim:].mean()


@pytest.mark.parametrize("bits", [3, 4])
def test_octave_words(bits):
    codes = np.random.default_rng(3).integers(0, 2**bits, (5, 64), dtype=np.uint8)
    data = octave_pack(codes, bits)
    np.testing.assert_array_equal(octave_unpack(data, bits, 64), codes)
    for j in (0, 3, 4, 9, 17, 38, 63):
        alone = np.zeros((1, 64), np.uint8)
        alone[0, j] = 2**bits - 1
        (at,) = np.nonzero(octave_pack(alone, bits)[0])
        if bits == 4:
            assert at == [j // 8 * 4 + j % 4]
        else:
            assert at.tolist() == [j // 16 * 4 + j % 4, 16 + j // 32 * 4 + j % 4]


def test_ultraquant_scales_are_rounded_powers_of_two():
    x = uneven((2, 5, 64))
    slots = fmt("ultraquant_4bit").encode_slots(x, x)
    value_scales = slots[..., -2:].reshape(-1)
    for group, e in zip(x.reshape(-1, 32), value_scales, strict=True):
        raw = 0.156 * np.abs(group).max()
        assert 2.0 ** (int(e) - 127 - 0.5) <= raw * 1.00001
        assert raw <= 2.0 ** (int(e) - 127 + 0.5) * 1.00001


def test_ultraquant_ties_go_down_and_zero_has_one_code():
    v = np.zeros((1, 32), np.float32)
    v[0, :7] = 6, 0.25, -0.25, 2.5, -2.5, -0.0, 5  # scale 2^floor(log2 .936 + .5) = 1
    slot = fmt("ultraquant_4bit").encode_slots(v, v)[0]
    codes = np.stack([slot[17:33] & 15, slot[17:33] >> 4], -1).ravel()
    assert slot[33] == 127
    assert codes[:8].tolist() == [7, 0, 9, 4, 13, 0, 6, 0]


# --- NVFP4 pages ----------------------------------------------------------------------
def test_a_page_is_key_codes_key_scales_value_codes_swizzled_value_scales():
    H, N, D, Dv = 2, 8, 64, 128
    kind = vllm.nvfp4(k_scale=0.5, v_scale=0.25, block_size=N)
    k, v = uneven((H, 19, D)), uneven((H, 19, Dv), 1)
    pages = np.frombuffer(kind.encode(k, v), np.uint8)
    pages = pages.reshape(3, kind.page_bytes(H, D, Dv))
    sizes = [H * N * D // 2, H * N * D // 16, H * N * Dv // 2, H * N * Dv // 16]
    k_codes, k_scales, v_codes, v_scales = np.split(pages, np.cumsum(sizes)[:3], axis=1)
    page, head, t = 2, 1, 1  # token 17
    alone = vllm.nvfp4(k_scale=0.5, v_scale=0.25, block_size=4)
    one = np.frombuffer(alone.encode(k[1:, 17:18], v[1:, 17:18]), np.uint8)
    row = (head * N + t) * D // 2
    np.testing.assert_array_equal(k_codes[page, row : row + D // 2], one[: D // 2])
    row = (head * N + t) * D // 16
    scales = one[4 * D // 2 :][: D // 16]
    np.testing.assert_array_equal(k_scales[page, row : row + D // 16], scales)
    row = (head * N + t) * Dv // 2
    codes = one[4 * (D // 2 + D // 16) :][: Dv // 2]
    np.testing.assert_array_equal(v_codes[page, row : row + Dv // 2], codes)
    scales = one[-4 * Dv // 16 :][0::4]  # of token 0 of four
    n = Dv // 16
    places = [head * N * n + t // 4 * 4 * n + 4 * s + t % 4 for s in range(n)]
    np.testing.assert_array_equal(v_scales[page, places], scales)
    assert not v_codes[2].reshape(H, N, -1)[:, 3:].any()  # after the last token


def test_nvfp4_reads_back_what_it_wrote_from_ragged_pages():
    k, v = uneven((3, 37, 64)), uneven((3, 37, 96), 1)
    kind = vllm.nvfp4(k_scale=0.1, v_scale=0.2, block_size=12)
    k_hat, v_hat = kind.decode(kind.encode(k, v), k.shape, 96)
    for x, y in ((k, k_hat), (v, v_hat)):
        top = np.abs(x).reshape(*x.shape[:-1], -1, 16).max(-1)
        assert (np.abs(x - y) <= np.repeat(top, 16, -1) * 0.2).all()


def test_four_over_six_has_no_larger_error():
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 3, 32, 64))
    plain, better = roundtrip("nvfp4", k, v), roundtrip("nvfp4_4over6", k, v)
    for x, y, z in zip((k, v), plain, better, strict=True):
        blocks = [np.square(x - a).reshape(-1, 16).sum(-1) for a in (y, z)]
        assert (blocks[1] <= blocks[0] * 1.00001).all()
        assert blocks[1].sum() < 0.9 * blocks[0].sum()


# --- hazards --------------------------------------------------------------------------
def test_fp8_beyond_the_scale_is_clamped_and_never_nan():
    k = np.float32([[1.0, 20, -300, 1e30]])
    k_hat, _ = vllm.fp8("e4m3", k_scale=10 / 448, v_scale=1).decode(
        vllm.fp8("e4m3", k_scale=10 / 448, v_scale=1).encode(k, k), k.shape
    )
    np.testing.assert_allclose(k_hat[0], [1, 10, -10, 10], rtol=0.06)
    naive = (k / np.float32(10 / 448)).astype(ml_dtypes.float8_e4m3fn)
    assert np.isnan(naive.astype(np.float32)).tolist() == [[False, True, True, True]]


def test_a_scale_word_of_int4_hides_the_zero_point():
    k = uneven((2, 6, 64), dtype=np.float16)
    kind = fmt("int4_per_token_head")
    slots = kind.encode_slots(k, k)
    word = np.ascontiguousarray(slots[..., 32:36]).view("<u4")
    assert len(np.unique(word & 15)) > 2
    as_float = word.view("<f4")
    masked = (word & ~np.uint32(15)).view("<f4")
    assert ((as_float - masked) / masked).max() < 2.0**-19
    # A reader who clears no bit and takes 8 for the zero is wrong by whole steps.
    wrong = slots.copy()
    wrong[..., 32] = wrong[..., 32] & 0xF0 | 8
    right, _ = kind.decode_slots(slots, 64)
    off, _ = kind.decode_slots(wrong, 64)
    error = np.square(right - k.astype(np.float32)).mean()
    assert np.square(off - k.astype(np.float32)).mean() > 2 * error


def test_int4_loses_a_vector_that_its_first_channel_outweighs():
    # The first row of a Hadamard matrix is constant: all rotated numbers get one sign.
    rest = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    first, second = rest.copy(), rest.copy()
    first[0, 0] = second[0, 1] = 100
    (lost, _), (kept, _) = (
        roundtrip("int4_per_token_head", k, k) for k in (first, second)
    )
    assert np.abs(second - kept).max() < 5
    assert np.abs(first - lost).max() > 50


def test_int4_refuses_a_rotation_that_overflows_float16():
    k = np.full((1, 64), 3000, np.float16)
    with pytest.raises(ValueError, match="overflows float16"):
        fmt("int4_per_token_head").encode(k * int4_signs(64).astype(np.float16), k)


def test_modelopt_scales_are_amax_over_448():
    assert calibrated_scale(np.float32(4.28125)) == np.float32(4.28125) / np.float32(
        448
    )
    assert calibrated_scale(0) == 2.0**-100


@pytest.mark.parametrize("name", PAIRS)
def test_zeros_and_constants_are_ordinary_input(name):
    k, v = np.zeros((2, 5, 64), np.float32), np.full((2, 5, 64), -1.5, np.float32)
    k_hat, v_hat = FORMATS[name].decode(FORMATS[name].encode(k, v), k.shape)
    assert np.abs(k_hat).max() < 1e-4
    if "int4" not in name:  # rotates constants into one channel, and has the hazard
        np.testing.assert_allclose(v_hat, v, rtol=0.25)


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_can_be_read(name):
    kind = FORMATS[name]
    shape = (2, 3, getattr(kind, "dim", 64))
    data = np.random.default_rng(8).integers(0, 256, kind.nbytes(shape), dtype=np.uint8)
    decoded = kind.decode(data.tobytes(), shape)
    for x in decoded if isinstance(decoded, tuple) else (decoded,):
        assert x.shape == shape


@pytest.mark.parametrize("name", PAIRS)
def test_wrong_input_is_one_clear_error(name):
    kind = FORMATS[name]
    x = np.ones((2, 3, 64), np.float32)
    with pytest.raises(TypeError, match="int64"):
        kind.encode(x.astype(np.int64), x)
    with pytest.raises(ValueError, match="nan"):
        kind.encode(x, np.full_like(x, np.nan))
    with pytest.raises(ValueError, match="do not match"):
        kind.encode(x, np.ones((2, 4, 64), np.float32))
    with pytest.raises(ValueError, match="expected"):
        kind.encode(x[:, :0], x[:, :0])
    with pytest.raises(ValueError, match="5 bytes"):
        kind.decode(b"12345", x.shape)


@pytest.mark.parametrize(
    ("name", "D"),
    [
        ("int4_per_token_head", 63),
        ("turboquant_4bit_nc", 96),
        ("octave_k3v4", 96),
        ("octave_k3v3_compact", 192),
        ("ultraquant_4bit", 48),
        ("ultraquant_4bit", 96),
        ("nvfp4", 40),
    ],
)
def test_an_impossible_head_dim_is_named(name, D):
    x = np.ones((1, 2, D), np.float32)
    with pytest.raises(ValueError, match=f"D={D}; valid"):
        fmt(name).encode(x, x)


def test_impossible_options_are_named():
    with pytest.raises(ValueError, match=r"k_scale=0"):
        vllm.fp8("e4m3", k_scale=0, v_scale=1)
    with pytest.raises(ValueError, match="kind='e3m4'"):
        vllm.fp8("e3m4", k_scale=1, v_scale=1)
    with pytest.raises(ValueError, match="block_size=6"):
        vllm.nvfp4(k_scale=1, v_scale=1, block_size=6)
    with pytest.raises(ValueError, match="octave_k4"):
        vllm.octave("octave_k4")
    with pytest.raises(ValueError, match="rope_dim=128"):
        vllm.octave("octave_k3v4", rope_dim=128).slot_bytes(64)


def test_scales_have_no_default():
    with pytest.raises(TypeError, match="v_scale"):
        vllm.fp8("e4m3", k_scale=1)
    with pytest.raises(TypeError, match="k_scale"):
        vllm.nvfp4()


# --- MLA records ----------------------------------------------------------------------
def bfloat16_bytes(x):
    return x.astype(ml_dtypes.bfloat16).tobytes()


def e4m3_bytes(x):
    return x.astype(ml_dtypes.float8_e4m3fn).tobytes()


def test_fp8_ds_mla_record_of_656_bytes():
    rng = np.random.default_rng(1)
    latent, rope = rng.standard_normal((2, 512)), rng.standard_normal((2, 64))
    scales = np.float32([[0.5, 0.25, 3, 7], [1, 2, 5, 0.125]])
    record = b"".join(
        e4m3_bytes(latent[i]) + scales[i].tobytes() + bfloat16_bytes(rope[i])
        for i in range(2)
    )
    x = fmt("fp8_ds_mla").decode(record, (2, 576))
    stored = latent.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(x[:, :512], stored * np.repeat(scales, 128, axis=1))
    np.testing.assert_array_equal(
        x[:, 512:], rope.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_fp8_ds_mla_v4_records_have_power_of_two_scales():
    rng = np.random.default_rng(2)
    latent, rope = rng.standard_normal(448), rng.standard_normal(64)
    scales = bytes(range(120, 127))
    record = e4m3_bytes(latent) + bfloat16_bytes(rope) + scales + b"\xff"
    x = fmt("fp8_ds_mla_v4").decode(record, (1, 512))[0]
    stored = latent.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    powers = np.repeat(2.0 ** (np.arange(120, 127) - 127), 64)
    np.testing.assert_array_equal(x[:448], stored * powers)
    np.testing.assert_array_equal(
        x[448:], rope.astype(ml_dtypes.bfloat16).astype(np.float32)
    )

    latent = rng.standard_normal(512)
    record = e4m3_bytes(latent) + bytes(range(119, 135))
    x = fmt("fp8_ds_mla_v4.1").decode(record, (1, 512))[0]
    stored = latent.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    powers = np.repeat(2.0 ** (np.arange(119, 135) - 127), 32)
    np.testing.assert_array_equal(x, stored * powers)


def test_nvfp4_ds_mla_record_has_permuted_scales():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, 512)
    scales = (rng.permutation(32) + 20).astype(np.uint8)  # of block 0, 1, ...
    stored = np.zeros(32, np.uint8)
    for s in range(32):
        stored[8 * (s & 3) + (s >> 2)] = scales[s]
    rope = rng.standard_normal(64)
    packed = bytes(int(a | b << 4) for a, b in codes.reshape(-1, 2))
    record = packed + e4m3_bytes(rope) + stored.tobytes()
    x = fmt("nvfp4_ds_mla").decode(record, (1, 576))[0]
    levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = np.append(levels, -levels)[codes]
    S = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(x[:512], expected * np.repeat(S, 16))
    np.testing.assert_array_equal(x[512:], E4M3.decode(E4M3.encode(rope)))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp8_ds_mla", 656),
        ("fp8_ds_mla_v4", 584),
        ("fp8_ds_mla_v4.1", 528),
        ("nvfp4_ds_mla", 352),
    ],
)
def test_mla_records_are_read_only(name, size):
    kind = fmt(name)
    assert kind.nbytes((5, kind.dim)) == 5 * size
    assert kind.bits_per_element((1, 1, 1)) == 8 * size / kind.dim
    with pytest.raises(ValueError, match="only be decoded"):
        kind.encode(np.ones((5, kind.dim), np.float32))
    with pytest.raises(ValueError, match=f"valid: {kind.dim}"):
        kind.decode(bytes(size), (1, 100))
