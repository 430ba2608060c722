"""How tests of `kvq.checks` ask: right answers pass, wrong ones are explained."""

import pytest


def assert_passes(check, answer, capsys):
    """The check takes the answer, and every line it prints begins with "ok: "."""
    check(answer)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("ok: ") for line in lines)


def assert_explained(check, wrong, cause):
    """The check refuses the answer, naming the cause and what was expected and got."""
    with pytest.raises(AssertionError, match=cause) as failure:
        check(wrong)
    text = str(failure.value)
    assert "expected" in text
    assert "got" in text
