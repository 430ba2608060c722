"""Chains of formats, and the table of all of them."""

from pathlib import Path

import numpy as np
import pytest

from kvq.cli import main
from kvq.formats import all_formats, find_format
from kvq.formats.convert import convert, markdown, table
from kvq.metrics import nmse
from kvq.samples import real_kv

SAMPLE = real_kv()
ROOT = Path(__file__).parents[2]


def test_a_lossless_step_adds_nothing():
    rows, _ = convert(SAMPLE.k, SAMPLE.v, ["ggml:f16", "ggml:f32", "ggml:f16"])
    assert [row["k_total"] for row in rows] == [0, 0, 0]


def test_each_step_is_measured_against_what_it_was_given():
    names = ["ggml:q4_0", "vllm:int8_per_token_head"]
    rows, data = convert(SAMPLE.k, SAMPLE.v, names)
    kind = find_format("ggml:q4_0")
    first = kind.decode(kind.encode(SAMPLE.k), SAMPLE.k.shape)
    slot = find_format("vllm:int8_per_token_head")
    k, _ = slot.decode(data[0], SAMPLE.k.shape, SAMPLE.v.shape[-1])
    assert rows[1]["k_step"] == nmse(first, k)
    assert rows[1]["k_total"] == nmse(SAMPLE.k, k)
    assert rows[0]["k_step"] == rows[0]["k_total"] > rows[1]["k_step"] > 0


def test_bytes_and_bits_count_keys_and_values():
    (row,), data = convert(SAMPLE.k, SAMPLE.v, ["ggml:q8_0"])
    assert row["bytes"] == sum(map(len, data)) == 2 * SAMPLE.k.size // 32 * 34
    assert row["bits"] == 8.5


@pytest.mark.parametrize("name", list(all_formats()))
def test_every_format_that_encodes_takes_the_real_sample(name):
    if "mla" in name or name == "ggml:nvfp4":
        with pytest.raises(ValueError, match="decode"):
            convert(SAMPLE.k, SAMPLE.v, [name])
        return
    (row,), _ = convert(SAMPLE.k, SAMPLE.v, [name])
    assert np.isfinite(row["k_total"])
    # One bit of HQQ leaves more error than storing zeros would.
    assert row["k_total"] < (2.5 if "int1" in name else 0.8)


def test_the_page_is_what_the_code_says():
    assert (ROOT / "kvq" / "formats" / "README.md").read_text() == markdown()


def test_every_row_is_complete():
    for row in table():
        assert all(row.values()), row["format"]


def test_convert_writes_the_last_format(tmp_path, capsys):
    out = tmp_path / "k.bin"
    assert main(["convert", "ggml:q4_0", "ggml:q8_0", "--out", str(out)]) == 0
    assert len(out.read_bytes()) == 2 * SAMPLE.k.size // 32 * 34
    assert "ggml:q8_0" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "ggml:q3"], "unknown format 'ggml:q3'; valid: ggml:f32"),
        (["convert"], "FORMAT"),
        (["convert", "vllm:fp8_ds_mla"], "decode"),
        (["convert", "ggml:q8_0", "--out", "no/such/folder/x"], "no/such/folder"),
        (["formats", "--json", "--markdown"], "not allowed"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
