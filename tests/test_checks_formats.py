"""Checks of the lessons on planning a deployment and on the systems' formats."""

import pytest

from kvq import checks


# --- right answers --------------------------------------------------------------------
def tokens_held(T, growing, sliding, W):
    return growing * T + sliding * min(T, W)


def users_sharing(free, c, P, o):
    return max(free - P * c, 0) // (o * c)


def step_speedup(W, C, r):
    return (W + C) / (W + C / r)


RIGHT = {
    checks.check_tokens_held: tokens_held,
    checks.check_users_sharing: users_sharing,
    checks.check_step_speedup: step_speedup,
    checks.check_binding_bits: lambda c, B, J: 8 * c * B / J,
}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_right_answer_passes_and_says_so(check, capsys):
    check(RIGHT[check])
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("ok: ") for line in lines)


# --- wrong answers --------------------------------------------------------------------
WRONG = [
    (checks.check_tokens_held, lambda T, g, s, W: g * T, "not counted"),
    (checks.check_tokens_held, lambda T, g, s, W: (g + s) * T, "no more than W"),
    (checks.check_tokens_held, lambda T, g, s, W: g * T + s * W, "before the window"),
    (checks.check_tokens_held, lambda T, g, s, W: (g + s) * min(T, W), "hold all T"),
    (checks.check_users_sharing, lambda m, c, P, o: m // (o * c), "takes room"),
    (checks.check_users_sharing, lambda m, c, P, o: m // ((P + o) * c), "stored once"),
    (checks.check_users_sharing, lambda m, c, P, o: (m - P * c) / (o * c), "round down"),
    (checks.check_users_sharing, lambda m, c, P, o: (m - P * c) // (o * c), "0 users"),
    (checks.check_users_sharing, lambda m, c, P, o: (m - P) // o, "are tokens"),
    (checks.check_step_speedup, lambda W, C, r: r, "are read as well"),
    (checks.check_step_speedup, lambda W, C, r: (W + C / r) / (W + C), "upside down"),
    (checks.check_step_speedup, lambda W, C, r: (W + C) / W, "does not vanish"),
    (checks.check_step_speedup, lambda W, C, r: W + C / r, "not the ratio"),
    (checks.check_binding_bits, lambda c, B, J: c * B / J, "a byte has 8 bits"),
    (checks.check_binding_bits, lambda c, B, J: J / (8 * c * B), "solve for b"),
    (checks.check_binding_bits, lambda c, B, J: 8 * c * J / B, "belongs on top"),
    (checks.check_binding_bits, lambda c, B, J: 8 * B / J, "per number are missing"),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    with pytest.raises(AssertionError, match=cause) as failure:
        check(wrong)
    text = str(failure.value)
    assert "expected" in text
    assert "got" in text
