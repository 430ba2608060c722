"""llama.cpp state files: the worked example, round trips, hostile input."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.formats.llama_state import (
    State,
    Stream,
    decode_rows,
    encode_rows,
    read,
    write,
)

# llama.cpp 0c1e57098: tokens 11, 12; one layer, embedding 32, q4_0.
GOLDEN = bytes.fromhex(
    "7173676703000000020000000b0000000c000000010000000200000000000000010000000000000001"
    "0000000100000000000000000000000100000002000000120000000000000048b8bf369d047ad248ae"
    "268cf46ac137ad1516b837ae158ce359c036ae047bd258bf269d02000000120000000000000048b851"
    "da731ca64fc862ea842da740d963fb16b8d962fb852db740ea630c953ec851ea73"
)


def ramp():
    i = np.arange(64)
    return (((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07).astype(np.float32)


def example(arch=None, transposed=False, kind="q4_0"):
    k = ramp().reshape(1, 2, 32)
    v = k[..., ::-1]
    stream = Stream([0, 1], [(0,), (0,)], transposed=transposed)
    stream.keys = [encode_rows(kind, k)]
    stream.values = [encode_rows("f16" if transposed else kind, v)]
    return State([11, 12], [stream], arch)


def test_llama_cpp_0c1e57098_sequence_file():
    assert len(GOLDEN) == 156
    assert write(example()) == GOLDEN


def test_reading_the_sequence_file_gives_its_parts():
    state = read(GOLDEN)
    assert state.tokens == [11, 12]
    (stream,) = state.streams
    assert stream.positions == [0, 1]
    assert stream.seq_ids == [(0,), (0,)]
    k = decode_rows(stream.keys[0], kv_heads=1)
    np.testing.assert_allclose(k[0].ravel(), ramp(), atol=0.3)


@pytest.mark.parametrize("arch", [None, "llama"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["q8_0", "iq4_nl", "bf16"])
def test_write_inverts_read(arch, transposed, kind):
    data = write(example(arch, transposed, kind))
    assert write(read(data)) == data
    assert read(data).arch == arch


def test_heads_lie_side_by_side_in_a_row():
    x = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    rows = encode_rows("f32", x)
    np.testing.assert_array_equal(rows.numbers()[4, 64:128], x[1, 4])
    np.testing.assert_array_equal(decode_rows(rows, 3), x)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGUF", "magic"),
        (4, struct.pack("<I", 9), "version 9; valid: 3"),
        (8, struct.pack("<I", 2**31), "token count"),
        (20, struct.pack("<I", 2**32 - 1), "stream count"),
        (24, struct.pack("<I", 2**30), "cell count"),
        (32, struct.pack("<I", 2**31 - 1), "sequence ids"),
        (52, struct.pack("<I", 7), "v_trans is 7"),
        (56, struct.pack("<I", 2**28), "layer count"),
        (60, struct.pack("<i", -1), "K type -1"),
        (64, struct.pack("<Q", 2**63), "row size"),
        (64, struct.pack("<Q", 18 * 2**40), "K rows"),
    ],
)
def test_hostile_fields_are_one_clear_error(at, value, message):
    data = GOLDEN[:at] + value + GOLDEN[at + len(value) :]
    with pytest.raises(ValueError, match=message) as error:
        read(data)
    assert "\n" not in str(error.value)


def test_every_truncation_is_an_error():
    for n in range(len(GOLDEN)):
        with pytest.raises(ValueError, match=r"\S"):
            read(GOLDEN[:n])
    with pytest.raises(ValueError, match="1 bytes after the end"):
        read(GOLDEN + b"\0")


@given(st.data())
def test_damaged_files_raise_value_error_or_parse(data):
    damaged = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 155))] = data.draw(st.integers(0, 255))
    try:
        state = read(bytes(damaged))
    except ValueError:
        return
    assert write(state) == bytes(damaged)
