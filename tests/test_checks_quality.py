"""Checks of the lesson on what a quantized cache costs a model."""

import numpy as np
import pytest
from answers import assert_explained, assert_passes

from kvq import checks


# --- right answers --------------------------------------------------------------------
def change(nll, nll_hat):
    d = nll_hat - nll
    return 100 * (np.exp(d.mean()) - 1), 100 * d.std(ddof=1) / np.sqrt(len(d))


def verdict(change, se, low, high, width=2):
    a, b = change - width * se, change + width * se
    if low <= a and b <= high:
        return "true"
    return "false" if b < low or a > high else "cannot tell"


def front(cost, loss):
    kept = []
    for i in sorted(range(len(cost)), key=lambda i: (cost[i], loss[i])):
        if not kept or loss[i] < loss[kept[-1]]:
            kept.append(i)
    return kept


def population(nll, nll_hat):
    d = nll_hat - nll
    return 100 * np.expm1(d.mean()), 100 * d.std() / len(d) ** 0.5


RIGHT = [
    (checks.check_perplexity, lambda nll: np.exp(nll.mean())),
    (checks.check_paired_change, change),
    (checks.check_paired_change, population),
    (checks.check_verdict, verdict),
    (checks.check_front, front),
    (checks.check_front, lambda c, loss: np.array(front(c, loss))),
]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_passes_and_says_so(check, answer, capsys):
    assert_passes(check, answer, capsys)


# --- wrong answers --------------------------------------------------------------------
def with_se(se):
    return lambda nll, nll_hat: (change(nll, nll_hat)[0], se(nll, nll_hat))


def all_by_cost(cost, loss):
    return np.argsort(cost, kind="stable")


def ties_kept(cost, loss):
    order = np.lexsort((loss, cost))
    best = np.minimum.accumulate(loss[order])
    return [i for i, b in zip(order, best, strict=True) if loss[i] <= b]


PERPLEXITY, CHANGE = checks.check_perplexity, checks.check_paired_change
VERDICT, FRONT = checks.check_verdict, checks.check_front
WRONG = [
    (PERPLEXITY, lambda nll: np.exp(nll).mean(), "mean first"),
    (PERPLEXITY, lambda nll: nll.mean(), "exp is missing"),
    (PERPLEXITY, lambda nll: np.exp(-nll.mean()), "minus sign already"),
    (PERPLEXITY, lambda nll: 2 ** nll.mean(), "in nats"),
    (PERPLEXITY, lambda nll: np.exp(nll.sum()), "not the sum"),
    (CHANGE, lambda a, b: change(a, b)[0], "expected"),
    (CHANGE, lambda a, b: change(b, a), "the sign"),
    (CHANGE, lambda a, b: (change(a, b)[0] / 100, 1), "times 100"),
    (CHANGE, lambda a, b: (100 * (b - a).mean(), 1), "take exp"),
    (CHANGE, lambda a, b: (100 * np.exp((b - a).mean()), 1), "subtract 1"),
    (CHANGE, lambda a, b: (100 * (b.mean() / a.mean() - 1), 1), "percent of it"),
    (CHANGE, with_se(lambda a, b: 100 * (b - a).std(ddof=1)), r"divide by sqrt\(n\)"),
    (CHANGE, with_se(lambda a, b: 100 * (b - a).std() / len(a)), "not by n"),
    (CHANGE, with_se(lambda a, b: change(a, b)[1] / 100), "times 100"),
    (CHANGE, with_se(lambda a, b: 100 * b.std(ddof=1) / 6**0.5), "take that of d"),
    (
        CHANGE,
        with_se(lambda a, b: 100 * np.hypot(a.std(ddof=1), b.std(ddof=1)) / 6**0.5),
        "differences of pairs",
    ),
    (VERDICT, lambda *a: verdict(*a, width=1), "2 se, not"),
    (VERDICT, lambda *a: verdict(*a, width=0), "both sides of 3"),
    (VERDICT, lambda c, se, a, b: "true" if c <= b else "false", "less than the claim"),
    (VERDICT, lambda c, se, a, b: a <= c <= b, "all of 1.4"),
    (FRONT, all_by_cost, "leave out those"),
    (FRONT, ties_kept, "8 costs more"),
    (FRONT, lambda c, loss: sorted(front(c, loss)), "order is by cost"),
    (FRONT, lambda c, loss: c[front(c, loss)], "not costs"),
    (FRONT, lambda c, loss: [], "by itself"),
]


@pytest.mark.parametrize(("check", "wrong", "cause"), WRONG)
def test_wrong_answer_is_explained(check, wrong, cause):
    assert_explained(check, wrong, cause)
