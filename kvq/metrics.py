r"""How far a quantized cache is from the original: measured errors, in float64.

From the inside out: the stored numbers, the logits, the attention weights, the
output. `kvq.bounds` predicts most of them. Arrays may have any float dtype.
Every function raises ValueError, naming both shapes, if the shapes do not match.
"""

import math

import numpy as np

from kvq.attention import scores


def _pair(x, x_hat, names="x, x_hat"):
    """Both as float64, after a check that their shapes are equal."""
    x, x_hat = np.asarray(x, np.float64), np.asarray(x_hat, np.float64)
    if x.shape != x_hat.shape:
        raise ValueError(f"{names} have shapes {x.shape} and {x_hat.shape}, not equal")
    return x, x_hat


# --- stored numbers -------------------------------------------------------------------
def mse(x, x_hat):
    """MSE = mean (x_hat - x)^2 over two arrays of one shape; 0.0 if they are empty."""
    x, x_hat = _pair(x, x_hat)
    return float(np.sum((x_hat - x) ** 2) / max(x.size, 1))


def nmse(x, x_hat):
    """NMSE = sum (x_hat - x)^2 / sum x^2.

    Where x is all zeros: 0.0 for a perfect copy, inf for any other.
    """
    x, x_hat = _pair(x, x_hat)
    error, signal = float(np.sum((x_hat - x) ** 2)), float(np.sum(x**2))
    if signal == 0:
        return 0.0 if error == 0 else math.inf
    return error / signal


def sqnr_db(x, x_hat):
    """SQNR = -10 log10 NMSE in dB: +inf for a perfect copy, -inf where NMSE is inf."""
    ratio = nmse(x, x_hat)
    return math.inf if ratio == 0 else -10 * math.log10(ratio)


def max_error(x, x_hat):
    """max |x_hat - x| over two arrays of one shape; 0.0 if they are empty."""
    x, x_hat = _pair(x, x_hat)
    return float(np.max(np.abs(x_hat - x), initial=0.0))


# --- logits ---------------------------------------------------------------------------
def logit_change(q, k, k_hat):
    """delta = q . (k_hat - k) / sqrt(D): how far each logit moves.

    q : (H_q, T_q, D). k, k_hat : (H_kv, T, D); H_q is a multiple of H_kv.
    Returns float64 (H_q, T_q, T).
    """
    k, k_hat = _pair(k, k_hat, "k, k_hat")
    return scores(q, k_hat - k)


def score_error(q, k, k_hat):
    """(max |delta|, sqrt(mean delta^2)), delta = `logit_change(q, k, k_hat)`.

    Two floats; both are 0.0 without tokens or queries.
    """
    delta = logit_change(q, k, k_hat)
    zero = np.zeros_like(delta)
    return max_error(zero, delta), math.sqrt(mse(zero, delta))


def logit_spread(delta):
    """omega = max_j delta_j - min_j delta_j: (..., T) -> float64 (...). Needs T >= 1.

    A shift that all logits share leaves the softmax, and omega, unchanged.
    """
    return np.ptp(np.asarray(delta, np.float64), axis=-1)


# --- attention weights ----------------------------------------------------------------
def attention_kl(p, p_hat):
    """KL(p || p_hat) = sum_j p_j ln(p_j / p_hat_j), in nats, for each query.

    p, p_hat : weights (..., T) that sum to 1. Tokens with p_j = 0 count nothing;
    p_hat_j = 0 beside p_j > 0 gives inf.
    Returns float64 (...), never negative.
    """
    p, p_hat = _pair(p, p_hat, "p, p_hat")
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = p * (np.log(p) - np.log(p_hat))
    kl = np.sum(np.where(p > 0, terms, 0.0), axis=-1)
    return np.maximum(kl, 0.0)  # rounding can leave -1e-17


def total_variation(p, p_hat):
    """TV = (1/2) sum_j |p_hat_j - p_j|, the weight that moved, for each query.

    p, p_hat : weights (..., T) that sum to 1. Returns float64 (...) within 0..1.
    """
    p, p_hat = _pair(p, p_hat, "p, p_hat")
    return np.sum(np.abs(p_hat - p), axis=-1) / 2


# --- output ---------------------------------------------------------------------------
def output_error(o, o_hat):
    """||o_hat - o||_2 / ||o||_2 over two arrays of one shape, as `nmse` at zeros."""
    return math.sqrt(nmse(o, o_hat))
