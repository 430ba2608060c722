r"""What theory predicts, to plot beside what is measured.

In order: the uniform quantizer, the best scalar quantizers of Gaussian numbers, the
extremes of a group (and so its scale and its error), one group with rounded
metadata, and how far an error in the cache moves the attention output.

Each function says whether it is an exact value, a bound that always holds, or a model.
Symbols: b bits, s step (the scale of a uniform quantizer), G group size, D head
dimension, q query, e = k_hat - k.
"""

import math
from functools import lru_cache

import numpy as np

from kvq.codebooks import lloyd_max, normal_cells, normal_pdf, normal_tail
from kvq.scheme import Scheme


# --- the uniform quantizer ------------------------------------------------------------
def max_error(step):
    """|x_hat - x| <= s / 2 inside the range. A bound."""
    return step / 2


def granular_mse(step):
    """E (x_hat - x)^2 = s^2 / 12: the error is uniform on [-s/2, s/2].

    A model, good where the density hardly changes within a step (Bennett 1948).
    """
    return step**2 / 12


def uniform_sqnr_db(bits, xmax, sigma):
    """SQNR = 10 log10(sigma^2 / (s^2 / 12)), s = 2 xmax / 2^b, in dB.

    = 6.02 b + 4.77 - 20 log10(xmax / sigma). A model, as `granular_mse`, for numbers
    of standard deviation `sigma` that stay within [-xmax, xmax].
    """
    return 10 * np.log10(sigma**2 / granular_mse(2 * xmax / 2**bits))


# --- the best scalar quantizers of N(0, 1) --------------------------------------------
def lloyd_max_mse(bits):
    """E (x - c(x))^2 = 1 - sum_i P_i c_i^2 for the Lloyd-Max levels c. Exact.

    P_i is the probability of cell i; the identity holds because each level is the
    mean of its cell. No quantizer of one number to 2^b levels does better.
    """
    c = lloyd_max(bits)[2 ** (bits - 1) :]
    P, _ = normal_cells(_positive_cells(c))
    return float(1 - 2 * np.sum(P * c**2))


@lru_cache
def optimal_uniform(bits):
    """(step, MSE) of the best 2^b equally spaced levels for N(0, 1). Exact.

    Levels +-k s, k = 1/2, 3/2, ... With P, M of `normal_cells` at thresholds s, 2s, ...

        MSE(s) = 1 - 2 s A + s^2 B,    A = 2 sum_k k M_k,    B = 2 sum_k k^2 P_k

    Thresholds halfway between levels add nothing to the slope, so the best step
    solves s B(s) = A(s); it is found by bisection.
    """
    k = np.arange(2 ** (bits - 1)) + 0.5
    low, high = 0.0, 2.0
    for _ in range(60):
        step = (low + high) / 2
        P, M = normal_cells(_positive_cells(k * step))
        A, B = 2 * np.sum(k * M), 2 * np.sum(k**2 * P)
        low, high = (step, high) if step * B < A else (low, step)
    return step, float(1 - 2 * step * A + step**2 * B)


def _positive_cells(c):
    """Thresholds 0, halfway between the positive levels c, inf."""
    return np.concatenate([[0], (c[:-1] + c[1:]) / 2, [np.inf]])


def rate_distortion(bits):
    """D(b) = 4^-b: no code of any kind for N(0, 1) has a smaller MSE. A bound."""
    return 4.0**-bits


def panter_dite(bits):
    """(sqrt(3) pi / 2) 4^-b: what `lloyd_max_mse` tends to (Panter and Dite 1951)."""
    return math.sqrt(3) * math.pi / 2 * 4.0**-bits


def gaussian_table(bits=range(1, 9)):
    """The four curves above for N(0, 1): a list of dicts, one per number of bits."""
    rows = []
    for b in bits:
        step, uniform_mse = optimal_uniform(b)
        rows.append(
            {
                "bits": b,
                "lloyd_max_mse": lloyd_max_mse(b),
                "lloyd_max_sqnr_db": -10 * math.log10(lloyd_max_mse(b)),
                "uniform_mse": uniform_mse,
                "uniform_step": step,
                "rate_distortion": rate_distortion(b),
                "panter_dite": panter_dite(b),
            }
        )
    return rows


# --- groups of G independent N(0, 1) numbers ------------------------------------------
@lru_cache
def expected_group_max(G, power=1):
    """E m^p, m = max|x| of G numbers. Exact, by numerical integration (6 digits).

        P(m <= x) = (2 Phi(x) - 1)^G,    E m^p = integral of p x^(p-1) P(m > x)

    over the positive x. E m is below sqrt(2 ln 2G): it grows slowly with the group.
    """
    x = np.linspace(0, 12, 12_001)
    above = 1 - (1 - 2 * normal_tail(x)) ** G
    return float(np.trapezoid(power * x ** (power - 1) * above, x))


@lru_cache
def expected_group_range(G, power=1):
    """E r^p, r = max - min of G numbers. Exact, by numerical integration (4 digits).

    u = min and v = max have the joint density, for u < v,

        f(u, v) = G (G - 1) phi(u) phi(v) (Phi(v) - Phi(u))^(G-2)

    and E r^p is the integral of (v - u)^p f(u, v).
    """
    if G == 1:
        return 0.0
    x, h = np.linspace(-9, 9, 361, retstep=True)
    phi, Phi = normal_pdf(x), 1 - normal_tail(x)
    r, between = np.abs(x - x[:, None]), np.abs(Phi - Phi[:, None])
    f = G * (G - 1) * phi * phi[:, None] * between ** (G - 2)
    return float(np.sum(r**power * f) * h**2 / 2)  # the square holds u < v twice


def group_mse(bits, G, levels="symmetric"):
    """The MSE of N(0, 1) numbers that share one scale in groups of G. A model.

        symmetric:   E s^2 / 12 * (G - 1) / G,   s = max|x| / (2^(b-1) - 1)
        asymmetric:  E s^2 / 12 * (G - 2) / G,   s = (max - min) / (2^b - 1)

    `granular_mse` with the mean of the squared scale (E m^2, a few percent above
    (E m)^2), and without the numbers that set the scale: they are stored exactly.
    From 3 bits it is within 2 % of simulated groups of 32 to 128. At 2 symmetric bits
    a step is wider than the density: there it is 6 % (G=32) to 15 % (G=128) too high.
    Raises ValueError for other levels or impossible bits.
    """
    if levels not in ("symmetric", "asymmetric"):
        raise ValueError(f"levels={levels!r}; valid: symmetric, asymmetric")
    Scheme(bits, levels=levels)  # raises where the number of bits is wrong
    if levels == "symmetric":
        s2 = expected_group_max(G, 2) / (2 ** (bits - 1) - 1) ** 2
        return s2 / 12 * (G - 1) / G
    s2 = expected_group_range(G, 2) / (2**bits - 1) ** 2
    return s2 / 12 * max(G - 2, 0) / G


# --- one group with its stored scale and zero -----------------------------------------
def group_error_bound(x, bits, scale, zero=None):
    """The largest |x - x_hat| that a group's metadata allows. A bound.

        s / 2 + L |s_stored - s| + |z_stored - z| + rounding

    s, z : scale and zero computed exactly from the group; L is the largest integer.
    rounding : difference, quotient, product and sum are float32 operations on numbers
        up to 2 max|x|; each is counted as one unit in the last place.

    x : float32 (..., G), one group per row. scale, zero : stored metadata (...).
        zero=None means symmetric levels, else asymmetric. Round to nearest.
    Returns float64 (...).
    """
    x = np.asarray(x, np.float64)
    top = np.max(np.abs(x), axis=-1)
    if zero is None:
        L = 2 ** (bits - 1) - 1
        s, z_error = top / L, 0.0
    else:
        L = 2**bits - 1
        s = np.ptp(x, axis=-1) / L
        z_error = np.abs(np.asarray(zero, np.float64) - np.min(x, axis=-1))
    s_error = np.abs(np.asarray(scale, np.float64) - s)
    rounding = 4 * (2.0**-23 * top + 2.0**-149)
    return max_error(s) + L * s_error + z_error + rounding


# --- from an error in the cache to an error in attention ------------------------------
def score_error_bound(q, step):
    """|q . e| <= sum_c |q_c| s_c / 2. A bound; = ||q||_1 s / 2 if all steps are s.

    q : (..., D). step : a number or (..., D), the step of each channel.
    Returns (...), for the dot product: divide by sqrt(D) for the logit.
    """
    return np.sum(np.abs(q) * max_error(step), axis=-1)


def score_error_variance(q, step):
    """Var(q . e) = sum_c q_c^2 s_c^2 / 12: independent uniform errors. A model.

    A wide channel costs its own step squared, times the query squared in it.
    Arguments as in `score_error_bound`; divide by D for the logit.
    """
    return np.sum(np.square(q) * granular_mse(step), axis=-1)


def qjl_variance(q, k, m):
    """Var = ((pi/2) ||q||^2 ||k||^2 - (q . k)^2) / m: QJL's estimate of q . k. Exact.

    The estimate is sqrt(pi/2) / m * ||k|| * (S q) . sign(S k), S (m, D) of N(0, 1)
    numbers: unbiased from one bit per row of S (arXiv 2406.03482).
    q, k : (..., D). Returns (...).
    """
    norms = np.sum(np.square(q), axis=-1) * np.sum(np.square(k), axis=-1)
    return (math.pi / 2 * norms - np.sum(q * k, axis=-1) ** 2) / m


def softmax_tv_bound(omega):
    """TV(p, p_hat) <= tanh(omega / 4), omega = max delta - min delta. A bound.

    p = softmax(s), p_hat = softmax(s + delta). Adding one number to all logits costs
    nothing. Two tokens with the right weights attain it.
    """
    return np.tanh(np.asarray(omega) / 4)


def softmax_kl_bound(omega):
    """KL(p || p_hat) <= omega^2 / 8 (Hoeffding's lemma), omega as above. A bound."""
    return np.square(omega) / 8


def output_error_bound(tv, radius, value_error):
    """||o_hat - o||_2 <= 2 TV R + max_j ||v_hat_j - v_j||_2. A bound.

    Keys move weights, at most TV of them, over a distance of at most 2R; each value
    moves by its own error.

    tv : TV(p, p_hat). radius : R of a ball that holds the values, as `value_radius`
    returns. value_error : max_j ||v_hat_j - v_j||. Numbers or arrays that broadcast.
    """
    return 2 * tv * radius + value_error


def value_radius(v):
    """R = max_j ||v_j - mean_j v_j||_2: v (..., T, D) -> (...). Needs T >= 1."""
    distance = np.linalg.norm(v - np.mean(v, axis=-2, keepdims=True), axis=-1)
    return np.max(distance, axis=-1)
