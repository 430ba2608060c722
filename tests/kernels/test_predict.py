"""Predictions follow from the recorded costs, by the formula of `kernels.predict`."""

import pytest

from kvq.hardware import device
from kvq.kernels import predict, static
from kvq.kernels.budgets import tensor_cores as budgets
from kvq.kernels.decode import tensor_cores
from kvq.kernels.launch import nvrtc
from kvq.kernels.pages import PageLayout
from kvq.kernels.report import facts_of
from kvq.scheme import FP16, Scheme


def layout(bits, G=64, value_G=64):
    key = Scheme(bits, "channel", G, "asymmetric")
    return PageLayout(key, Scheme(bits, "token", value_G, "asymmetric"), 128)


def test_the_formula_by_hand():
    """An H200 copies 4.3e12 bytes/s, starts 132 * 128 * 1.98e9 instructions/s."""
    found = predict.launch("H200", 43_000_000, 43_000_000 * 3.5, 1e9, overhead=2e-6)
    memory, issue, matrix = 10e-6, 43e6 * 3.5 / (132 * 128 * 1.98e9), 1e9 / 989.4e12
    assert found["memory_seconds"] == pytest.approx(memory)
    assert found["issue_seconds"] == pytest.approx(issue)
    assert found["matrix_seconds"] == pytest.approx(matrix)
    assert found["seconds"] == pytest.approx(12e-6)
    assert found["seconds_apart"] == pytest.approx(2e-6 + memory + issue + matrix)
    assert found["copy_percent"] == pytest.approx(100 * 10 / 12)
    assert found["limit"] == "bandwidth"


def test_without_a_measured_copy_the_datasheet_counts():
    assert predict.launch("L4", 300e9, 0, overhead=0)["seconds"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"tokens": 512}, "overhead"),
        ({"tokens": 2**20}, "bandwidth"),
        ({"tokens": 2**20, "bits": 2, "ratio": 32}, "instructions"),
        ({"tokens": 2**20, "bits": 2, "device": "RTX-3090"}, "tensor cores"),
    ],
)
def test_what_limits(options, limit):
    assert predict.decode(**{"device": "H200"} | options)["limit"] == limit


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("G", [32, 64, 128])
def test_bytes_are_those_of_the_pages(bits, G):
    value_G = max(G, 64)
    found = predict.decode("H200", "v4", bits, 1280, batch=3, G=G, value_G=value_G)
    pages = layout(bits, G, value_G)
    assert found["bytes"] == 3 * 8 * 1280 // pages.tokens * pages.words * 4
    stored = bits + 16 / G + 16 / value_G
    assert found["effective_bits"] == stored
    assert found["ceiling"] == 16 / stored


def test_full_precision_has_no_scales():
    for D in (128, 64):
        found = predict.decode("A100-80GB", "v5", 16, 640, batch=2, D=D)
        assert found["bytes"] == 2 * 8 * 640 * D * 2 * 2
        assert found["ceiling"] == 1
        assert 0 < found["instructions_per_byte"] < 1


def test_instructions_are_the_recorded_ones():
    rows, _ = budgets.recorded()
    key = {"kernel": "decode_v5", "bits": 4, "keys_per": "channel", "G": 64, "D": 128}
    for name, arch in (("H100-SXM", 90), ("RTX-4090", 80)):
        wanted = key | {"arch": arch, "ratio": 4}
        (row,) = (r for r in rows if all(r[k] == v for k, v in wanted.items()))
        found = predict.decode(name)
        assert found["instructions_per_byte"] == row["instructions_per_byte"]
        rate = device(name).issue_rate
        expected = found["bytes"] * row["instructions_per_byte"] / rate
        assert found["issue_seconds"] == pytest.approx(expected)
        share = budgets.issue_share(row["instructions_per_byte"], name)
        assert found["issue_share"] == pytest.approx(share)


def test_more_query_heads_take_a_second_tile_then_a_second_pass():
    few, tile, two = (predict.decode("H200", ratio=ratio) for ratio in (8, 9, 17))
    assert few["bytes"] == tile["bytes"] == two["bytes"]
    per_byte = [x["instructions_per_byte"] for x in (few, tile, two)]
    assert per_byte[0] < per_byte[1]
    assert per_byte[2] == 2 * per_byte[1]
    matrix = [x["matrix_seconds"] / few["matrix_seconds"] for x in (tile, two)]
    assert matrix == pytest.approx([2, 4])


@pytest.mark.skipif(
    bool(nvrtc.unavailable() or static.unavailable()), reason="no compiler"
)
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_products_are_as_many_as_in_the_machine_code(bits):
    """64 of 64 tokens are q K^T and P V: 2 * 64 * 128 / 256."""
    pages = PageLayout(FP16, FP16, 128) if bits == 16 else layout(bits)
    compiled = tensor_cores.constants("v5", pages, 4)
    facts = facts_of(tensor_cores.VERSIONS["v5"].source, compiled, 90)["decode_v5"]
    products = static.count(budgets.main_loop(facts), "HMMA")
    assert products * pages.steps / pages.tokens == predict.PRODUCTS[bits]


def test_the_ladder_ends_with_v5_and_begins_with_what_was_counted():
    found = predict.ladder("H200", 4, 32768, batch=8)
    assert list(found) == ["v1", "v2", "v3", "v4", "v5"]
    assert len({x["bytes"] for x in found.values()}) == 1
    percents = [x["copy_percent"] for x in found.values()]
    assert percents[0] < percents[1] < percents[2] < percents[4]
    assert list(predict.ladder("H200", 2)) == ["v2", "v3", "v4", "v5"]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_speed_up_grows_up_to_its_ceiling(bits):
    found = [predict.speedup("A100-80GB", bits, 2**n) for n in range(9, 22)]
    assert found == sorted(found)
    ceiling = predict.decode("A100-80GB", bits=bits)["ceiling"]
    assert 0.98 * ceiling < found[-1] < ceiling


def test_the_first_context_that_is_fast_enough():
    T = predict.first_tokens("H200", 4, 1.5)
    assert predict.speedup("H200", 4, T - 64) < 1.5 <= predict.speedup("H200", 4, T)
    assert T % 64 == 0
    assert predict.first_tokens("H200", 4, 3.6) is None  # its ceiling is 3.56


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "T4"}, "device='T4'; valid: H200, H100-SXM"),
        ({"device": "B300"}, "unknown device 'B300'; valid: A100-40GB"),
        ({"bits": 3}, r"no cost recorded for \('decode_v5', 3, 90, "),
        ({"G": 16}, "'channel', 64, 64"),
        ({"version": "v3"}, "no cost recorded for"),
    ],
)
def test_what_is_not_recorded_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        predict.decode(**{"device": "H200"} | options)
