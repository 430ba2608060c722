from dataclasses import replace

import pytest

from kvq.hardware import DEVICES, GIB, MIB, device

# Lane instructions per byte that a kernel may use before they bind, at the clock and
# bandwidth in the row (the H200 at what a copy measured).
BUDGETS = [
    ("H200", 1.755e9, 4.3e12, 6.9),
    ("H200", 1.980e9, 4.3e12, 7.8),
    ("H100-SXM", 1.755e9, 3.35e12, 8.9),
    ("A100-80GB", 1.410e9, 2.039e12, 9.6),
    ("RTX-3090", 1.695e9, 936e9, 19),
    ("RTX-5090", 2.407e9, 1792e9, 29),
    ("RTX-4090", 2.520e9, 1008e9, 41),
]


@pytest.mark.parametrize(("name", "clock", "bandwidth", "expected"), BUDGETS)
def test_instruction_budget_per_byte(name, clock, bandwidth, expected):
    card = replace(device(name), clock=clock)
    budget = card.issue_rate / bandwidth
    assert budget == pytest.approx(expected, rel=0.02)


def test_budget_uses_the_measured_copy_where_there_is_one():
    h200, h100 = device("H200"), device("H100-SXM")
    assert h200.instructions_per_byte == h200.issue_rate / 4.3e12
    assert h100.instructions_per_byte == h100.issue_rate / 3.35e12


def test_memory_label_is_binary_and_usable_is_less():
    assert device("A100-80GB").memory == 85_899_345_920
    assert device("A100-40GB").memory == 40 * GIB
    assert device("A6000").memory == 48 * GIB
    for card in DEVICES.values():
        assert 0.93 * card.memory < card.usable <= card.memory


@pytest.mark.parametrize("name", ["L4", "L40S", "T4"])
def test_error_correction_takes_one_sixteenth_of_gddr6(name):
    card = device(name)
    assert card.usable == pytest.approx(card.memory * 15 / 16, rel=1e-3)


def test_tensor_cores_do_a_power_of_two_per_clock():
    expected = {
        "A100": 2048,
        "H": 4096,
        "RTX": 512,
        "A6000": 1024,
        "L": 1024,
        "T": 1024,
    }
    for name, card in DEVICES.items():
        per_clock = card.fp16_flops / (card.sms * card.clock)
        prefix = max((p for p in expected if name.startswith(p)), key=len)
        assert per_clock == pytest.approx(expected[prefix], rel=0.08), name


def test_every_row_is_complete_and_plausible():
    for name, card in DEVICES.items():
        assert card.name == name
        assert card.source.startswith("NVIDIA ")
        assert 3e11 <= card.bandwidth <= 5e12
        assert 1e9 < card.clock < 3e9
        assert 4 * MIB <= card.l2 <= 128 * MIB
        assert card.copy_bandwidth is None or card.copy_bandwidth < card.bandwidth
        if card.copy_bandwidth:
            assert "measured" in card.source


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "rtx_4090", "RTX-4090"])
def test_lookup_forgives_spelling(name):
    assert device(name) is DEVICES["RTX-4090"]


def test_lookup_passes_a_device_through():
    mine = replace(device("T4"), name="mine")
    assert device(mine) is mine


@pytest.mark.parametrize("name", ["A100", "", None, 4090])
def test_unknown_device_lists_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"unknown device .*A100-40GB.*T4"):
        device(name)
