import dataclasses
import math

import pytest
from plain import groups

from kvq.scheme import (
    CODEBOOKS,
    FP16,
    PER,
    PRESETS,
    SCALE_DTYPES,
    UNIFORM,
    Policy,
    Scheme,
    policy,
)

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "e8m0": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits=0 .*valid: 2, 3, 4, 5, 6, 7, 8"),
        ({"bits": 9}, "bits=9 .*valid: 2, 3"),
        ({"bits": 1}, "bits=1 with levels='symmetric'"),
        ({"bits": 1, "levels": "full-range"}, "bits=1"),
        ({"bits": 0, "levels": "asymmetric"}, "valid: 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"bits": 2.5}, "bits=2.5"),
        ({"bits": 4.0}, "bits=4.0"),
        ({"bits": True, "levels": "asymmetric"}, "bits=True"),
        ({"bits": "4"}, "bits='4'"),
        ({"bits": None}, "bits=None"),
        ({"bits": 3, "levels": "nf4"}, "bits=3 with levels='nf4'; valid: 4"),
        ({"bits": 4, "levels": "e4m3"}, "valid: 8"),
        ({"bits": 4, "levels": "float16"}, "valid: 16"),
        ({"bits": 16, "levels": "float32"}, "valid: 32"),
        ({"bits": 16}, "bits=16"),
        ({"per": "row"}, "per='row'; valid: token, channel, head, tensor"),
        ({"levels": "int4"}, "levels='int4'; valid: symmetric, asymmetric"),
        ({"group": 0}, "group=0; valid: an integer >= 1 or None"),
        ({"group": -32}, "group=-32"),
        ({"group": 32.0}, "group=32.0"),
        ({"group": True}, "group=True"),
        ({"scale_dtype": "int8"}, "scale_dtype='int8'; valid: float16"),
        ({"transform": "fft"}, "transform='fft'; valid: None, hadamard"),
        ({"rounding": "up"}, "rounding='up'; valid: half-even"),
        ({"levels": "asymmetric", "scale_dtype": "e8m0"}, "scale_dtype='e8m0'"),
        ({"levels": "signed-extreme", "scale_dtype": "e8m0"}, "scale_dtype='e8m0'"),
        ({"levels": "nf4", "rounding": "toward-zero"}, "rounding='toward-zero'"),
        (
            {"bits": 16, "levels": "float16", "transform": "hadamard"},
            "transform='hadamard'",
        ),
    ],
)
def test_a_wrong_option_is_named_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "int4"}, "key='int4'; valid: a Scheme"),
        ({"value": 4}, "value=4; valid: a Scheme or None"),
        ({"residual": -1}, "residual=-1; valid: an integer >= 0"),
        ({"residual": 1.5}, "residual=1.5"),
        ({"sinks": -1}, "sinks=-1"),
        ({"sinks": False}, "sinks=False"),
    ],
)
def test_a_wrong_policy_is_named_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        Policy(**{"key": Scheme(), "value": Scheme(), **options})


@pytest.mark.parametrize("name", ["kivi", "q4", "", 4.0, None, ["kivi-2"], Scheme()])
def test_an_unknown_policy_is_named_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"unknown policy .*; valid: fp16, bf16"):
        policy(name)


def test_policies_are_found_by_name_and_passed_through():
    assert policy("kivi-2") is PRESETS["kivi-2"]
    own = Policy(Scheme(), Scheme())
    assert policy(own) is own
    assert [p.name for p in PRESETS.values()] == list(PRESETS)


def test_schemes_are_values():
    assert Scheme(4) == Scheme(bits=4)
    assert len({Scheme(4), Scheme(4), Scheme(8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Scheme().bits = 8
    with pytest.raises(ValueError, match="bits=11"):
        dataclasses.replace(Scheme(), bits=11)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("G", [None, 1, 3, 32, 1000])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 20), (3, 33, 65), (2, 0, 5)])
def test_groups_and_bytes_are_those_counted_one_by_one(per, G, shape):
    H, T, D = shape
    for levels, dtype in [("asymmetric", "float16"), ("symmetric", "float8_e4m3fn")]:
        scheme = Scheme(3, per, G, levels, dtype)
        cells = groups(scheme, H, T, D)
        numbers = len(cells) * (2 if levels == "asymmetric" else 1)
        assert math.prod(scheme.metadata_shape(H, T, D)) == len(cells)
        rows = H * T * math.ceil(3 * D / 8)
        assert scheme.nbytes(H, T, D) == rows + numbers * BYTES[dtype]


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (PRESETS["int4-token-g64"].key, 4.25),
        (PRESETS["int4-token-g64-asym"].key, 4.5),
        (PRESETS["kivi-2"].key, 3.0),
        (PRESETS["kivi-2"].value, 3.0),
        (PRESETS["kivi-4"].key, 5.0),
        (PRESETS["int8-token"].key, 8.125),
        (PRESETS["turboquant-4"].key, 4.125),
        (PRESETS["mxfp4"].key, 4.25),
        (PRESETS["mxfp8"].key, 8.25),
        (PRESETS["fp16"].key, 16),
        (PRESETS["fp32"].key, 32),
    ],
)
def test_bits_per_element_of_known_formats_at_head_dim_128(scheme, bits):
    assert scheme.bits_per_element(T=4096, D=128) == bits


@pytest.mark.parametrize("sizes", [(0, 4, 1), (4, 0, 1), (4, 4, 0), (-1, 4, 1)])
def test_bits_per_element_of_nothing_is_an_error(sizes):
    T, D, H = sizes
    with pytest.raises(ValueError, match="valid: integers >= 1"):
        Scheme().bits_per_element(T, D, H)


@pytest.mark.parametrize("D", [80, 96, 576])
@pytest.mark.parametrize("transform", ["hadamard", "signed-hadamard"])
def test_a_rotation_needs_a_power_of_two(transform, D):
    with pytest.raises(ValueError, match=f"power of two, not {D}"):
        Scheme(transform=transform).check_head_dim(D)
    Scheme(transform=transform).check_head_dim(64)
    Scheme().check_head_dim(D)


@pytest.mark.parametrize("D", [0, -1, 1.5])
def test_a_head_dimension_is_a_positive_integer(D):
    with pytest.raises(ValueError, match="head_dim="):
        Scheme().check_head_dim(D)


def test_token_blocks_and_their_common_multiple():
    channel, head = Scheme(4, "channel", 6), Scheme(4, "head", 4)
    token = Scheme(4, "token", 64)
    assert [s.token_block for s in (channel, head, token, FP16)] == [6, 4, 1, 1]
    assert Policy(channel, head).block == 12
    assert Policy(token, channel).block == 6
    assert Policy(head, None).block == 4


@pytest.mark.parametrize("per", ["channel", "head", "tensor"])
def test_a_cache_refuses_groups_that_span_all_tokens(per):
    whole = Policy(Scheme(4), Scheme(4, per, None))
    with pytest.raises(ValueError, match=f"per='{per}' with group=None"):
        _ = whole.block


@pytest.mark.parametrize("R", [0, 1, 5, 32])
@pytest.mark.parametrize("S", [0, 3])
@pytest.mark.parametrize("G", [1, 4, 32])
def test_split_places_every_token_once(R, S, G):
    p = Policy(Scheme(4, "channel", G), Scheme(4), residual=R, sinks=S)
    before = 0
    for T in range(120):
        sinks, quantized, window = p.split(T)
        assert sinks + quantized + window == T
        assert sinks == min(S, T)
        assert quantized % G == 0
        assert window == T - sinks if quantized == 0 else R <= window < R + G
        assert window < R + G
        assert quantized >= before
        before = quantized


@pytest.mark.parametrize("levels", [*UNIFORM, *CODEBOOKS])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_e8m0_is_refused_where_zeros_or_negative_scales_are_stored(levels, dtype):
    bits = {"e4m3": 8, "e5m2": 8}.get(levels, 4)
    if dtype == "e8m0" and levels in ("asymmetric", "signed-extreme"):
        with pytest.raises(ValueError, match="positive powers of two"):
            Scheme(bits, levels=levels, scale_dtype=dtype)
    else:
        assert Scheme(bits, levels=levels, scale_dtype=dtype).row_bytes(3) == (
            3 if bits == 8 else 2
        )
