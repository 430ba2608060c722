"""Checks of the lesson on paging and prefixes."""

import pytest
from answers import assert_explained, assert_passes

from kvq import checks


# --- right answers --------------------------------------------------------------------
def usable_blocks(T, R, B, stored):
    return min(min(max(T - R, 0), T - 1) // B, stored)


def typed(*fields):
    return "".join(f"{type(x).__name__}:{len(str(x))}:{x}" for x in fields)


RIGHT = [
    (checks.check_locate, lambda t, table, B: (table[t // B], t % B)),
    (checks.check_encode, typed),
    (checks.check_encode, lambda *fields: repr(fields)),
    (checks.check_encode, lambda *fields: typed(*fields).encode()),
    (checks.check_usable_blocks, usable_blocks),
]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_passes_and_says_so(check, answer, capsys):
    assert_passes(check, answer, capsys)


# --- wrong answers --------------------------------------------------------------------
def joined(separator):
    return lambda *fields: separator.join(map(str, fields))


WRONG = [
    (checks.check_locate, lambda t, table, B: (t // B, t % B), "position in the table"),
    (checks.check_locate, lambda t, table, B: (t % B, table[t // B]), "order is"),
    (checks.check_locate, lambda t, table, B: (table[t // B], t), "from the beginning"),
    (checks.check_locate, lambda t, table, B: (table[t // B], t % B + 1), "from 0"),
    (checks.check_locate, lambda t, table, B: table[t // B], "expected"),
    (checks.check_encode, joined(""), "run together"),
    (checks.check_encode, joined(","), "separator"),
    (checks.check_encode, joined("\0"), "separator"),
    (checks.check_encode, lambda *f: "".join(f"{len(str(x))}:{x}" for x in f), "type"),
    (checks.check_encode, lambda *f: repr([x for x in f if x != ""]), "an empty field"),
    (checks.check_encode, lambda *f: repr(sorted(map(repr, f))), "order of the fields"),
    (checks.check_encode, lambda *fields: None, "nothing is returned"),
    (checks.check_encode, lambda *fields: object(), "nothing is returned"),
    (checks.check_usable_blocks, lambda T, R, B, n: min((T - 1) // B, n), "window"),
    (
        checks.check_usable_blocks,
        lambda T, R, B, n: min(max(T - R, 0) // B, n),
        "last token",
    ),
    (
        checks.check_usable_blocks,
        lambda T, R, B, n: min(max(T - R, 0), T - 1) // B,
        "than the index has",
    ),
    (
        checks.check_usable_blocks,
        lambda T, R, B, n: -(-usable_blocks(T, R, 1, n * B) // B),
        "round down",
    ),
    (
        checks.check_usable_blocks,
        lambda T, R, B, n: usable_blocks(T, R, B, n) * B,
        "return blocks",
    ),
    (
        checks.check_usable_blocks,
        lambda T, R, B, n: min(min(T - R, T - 1) // B, n),
        "nothing to take",
    ),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    assert_explained(check, wrong, cause)
