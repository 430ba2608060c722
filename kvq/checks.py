"""Checks of the lessons' exercises: they print `ok`, or explain what is wrong.

Each `check_*` calls a learner's function on small, uneven inputs. A wrong answer
raises AssertionError with the worst element, what was expected, what came, and the
likely cause: the typical mistake that gives exactly this answer.
"""

import numpy as np

from kvq.attention import softmax
from kvq.cache import KVCache
from kvq.memory import cache_bytes
from kvq.packing import pack
from kvq.scheme import Policy, Scheme
from kvq.tensor import quantize
from kvq.transforms import hadamard_matrix


# --- how an answer is compared --------------------------------------------------------
def compare(what, got, expected, mistakes=(), rtol=1e-6):
    """Print `ok: what` if got equals expected to `rtol`; else explain and raise.

    got, expected : numbers or arrays. mistakes : {cause: the answer it gives}.
    Raises AssertionError.
    """
    if got is None:
        raise AssertionError(f"{what}: got None. Does the function return its result?")
    try:
        got = np.asarray(got, np.float64)
    except (TypeError, ValueError):
        raise AssertionError(f"{what}: got {got!r}; expected numbers") from None
    expected = np.asarray(expected, np.float64)
    if got.shape != expected.shape or not np.allclose(got, expected, rtol, 0):
        difference = _difference(got, expected, rtol)
        cause = _likely_cause(got, dict(mistakes), rtol)
        raise AssertionError(f"{what}: {difference}\nlikely cause: {cause}")
    print(f"ok: {what}")


def _difference(got, expected, rtol):
    if got.shape != expected.shape:
        return f"got shape {got.shape}, expected {expected.shape}"
    if got.ndim == 0:
        return f"expected {expected:.7g}, got {got:.7g}"
    wrong = ~np.isclose(got, expected, rtol, 0)
    error = np.nan_to_num(np.abs(got - expected), nan=np.inf)
    worst = np.unravel_index(np.argmax(np.where(wrong, error, -1)), got.shape)
    index = ", ".join(map(str, worst))
    return (
        f"{wrong.sum()} of {got.size} elements are wrong\n"
        f"worst element [{index}]: expected {expected[worst]:.7g}, got {got[worst]:.7g}"
    )


def _likely_cause(got, mistakes, rtol):
    for cause, answer in mistakes.items():
        answer = np.asarray(answer, np.float64)
        if got.shape == answer.shape and np.allclose(got, answer, rtol, equal_nan=True):
            return cause
    if not np.all(np.isfinite(got)):
        return "a division by zero or an overflow: the result is not finite"
    return "none of the usual ones; compare the equation with your code, term by term"


def unpack_answer(what, answer, names):
    """The learner's results, which must be a tuple (name, name, ...)."""
    if not isinstance(answer, tuple) or len(answer) != len(names):
        raise AssertionError(
            f"{what}: got {type(answer).__name__}; expected ({', '.join(names)})"
        )
    return answer


# --- bytes ----------------------------------------------------------------------------
def check_bits_per_number(f):
    """f(b, G) -> bits per number: b-bit codes and one 16-bit scale per G numbers."""
    b, G = 3, 48
    mistakes = {
        "the scale is not counted": b,
        "the scale has 16 bits, not 2: bits and bytes are mixed": b + 2 / G,
        "the scale is shared by G numbers: divide its 16 bits by G": b + 16,
        "this is bytes per number; multiply by 8": (b + 16 / G) / 8,
    }
    expected = Scheme(b, "token", G).bits_per_element(T=5, D=2 * G)
    compare(f"bits per number, b={b}, G={G}", f(b, G), expected, mistakes)


def check_cache_bytes(f):
    """f(L, T, H_kv, D, b, G) -> bytes: b-bit codes, an FP16 scale per G numbers."""
    L, T, H_kv, D, b, G = 3, 17, 5, 96, 4, 32
    scheme = Scheme(b, "token", G)
    expected = cache_bytes(
        Policy(scheme, scheme), layers=L, kv_heads=H_kv, head_dim=D, tokens=T
    )
    numbers = 2 * L * T * H_kv * D
    mistakes = {
        "keys and values are two tensors: a factor 2 is missing": expected / 2,
        "the scales are not counted": numbers * b / 8,
        "b is in bits: divide it by 8": numbers * (b + 2 / G),
        "the scale has 2 bytes, not 16": numbers * (b / 8 + 16 / G),
    }
    compare("bytes of the cache", f(L, T, H_kv, D, b, G), expected, mistakes)


def check_users(f):
    """f(memory, weights, cache) -> users whose caches fit beside the weights."""
    cache = 2**30
    for memory, weights in ((25.5 * cache, 12.7 * cache), (cache, 3.5 * cache)):
        expected = max(int((memory - weights) // cache), 0)
        mistakes = {
            "the weights are not counted": memory // cache,
            "a part of a user is no user: round down": np.ceil(
                (memory - weights) / cache
            ),
            "the number of users is an integer: use //": (memory - weights) / cache,
            "weights that do not fit leave room for 0 users, not for fewer": (
                memory - weights
            )
            // cache,
        }
        what = f"users with {memory / cache} GiB and weights of {weights / cache} GiB"
        compare(what, f(memory, weights, cache), expected, mistakes)


def check_longest_context(f):
    """f(budget, token_bytes, block) -> most tokens, a multiple of block."""
    budget, token_bytes, block = 1_000_000, 544, 16
    tokens = budget // token_bytes
    mistakes = {
        "tokens come in whole blocks: round down to a multiple of `block`": tokens,
        "this rounds up: the last block does not fit": -(-tokens // block) * block,
        "this is blocks, not tokens": tokens // block,
        "`token_bytes` is for one token, not for a block": budget
        // token_bytes
        * block,
    }
    compare(
        "tokens that fit, in whole blocks",
        f(budget, token_bytes, block),
        tokens // block * block,
        mistakes,
    )


# --- quantizers -----------------------------------------------------------------------
def check_symmetric(f):
    """f(x, b) -> (codes, s): s = max|x| / Q, integers -Q..Q, Q = 2^(b-1) - 1."""
    x, b = np.array([0.4, -1.0, 2.6, -3.1, 0.0, 1.55, 1.3]), 3
    codes, s = unpack_answer("symmetric quantizer", f(x, b), ("codes", "s"))
    top = np.abs(x).max()
    mistakes = {
        "the largest |x| counts, also where x is negative": x.max() / 3,
        "this divides by 2^(b-1); Q is one less": top / 4,
        "this divides by 2^b - 1, as the asymmetric quantizer does": top / 7,
    }
    compare("scale s", s, top / 3, mistakes)
    mistakes = {
        "x / s was cut off, not rounded": np.trunc(x / s),
        "x / s was not rounded": x / s,
        "these are the stored codes: leave out the offset": np.rint(x / s) + 4,
    }
    compare("codes", codes, np.rint(x / s), mistakes)
    codes, s = f(np.zeros(3), b)
    compare("codes of a group of zeros", codes, np.zeros(3))


def check_asymmetric(f):
    """f(x, b) -> (codes, s, z): s = (max - min) / (2^b - 1), z = min."""
    x, b = np.array([10.5, 11.0, 12.3, 13.9, 14.0, 10.9]), 4
    names = ("codes", "s", "z")
    codes, s, z = unpack_answer("asymmetric quantizer", f(x, b), names)
    low, high = x.min(), x.max()
    mistakes = {
        "2^b levels have 2^b - 1 steps between them": (high - low) / 2**b,
        "this is the symmetric scale": high / (2 ** (b - 1) - 1),
        "the range starts at min, not at 0": high / (2**b - 1),
    }
    compare("scale s", s, (high - low) / (2**b - 1), mistakes)
    mistakes = {
        "z is the minimum itself, a real number, not a code": np.rint(-low / s),
        "z is the minimum, without a change of sign": -low,
    }
    compare("zero z", z, low, mistakes)
    mistakes = {
        "z must be subtracted before the division": np.rint(x / s),
        "(x - z) / s was cut off, not rounded": np.trunc((x - low) / s),
        "codes were clipped to b - 1 bits": np.clip(np.rint((x - low) / s), 0, 7),
    }
    compare("codes", codes, np.rint((x - low) / s), mistakes)
    codes, s, z = f(np.full(3, 2.5), b)
    compare("a constant group comes back exactly", s * np.asarray(codes) + z, [2.5] * 3)


def check_sqnr(f):
    """f(b, xmax, sigma) -> dB: 10 log10(sigma^2 / (s^2 / 12)), s = 2 xmax / 2^b."""
    b, xmax, sigma = 5, 3.0, 0.8
    s = 2 * xmax / 2**b
    expected = 10 * np.log10(sigma**2 / (s**2 / 12))
    mistakes = {
        "use log10, not the natural logarithm": expected * np.log(10),
        "the ratio is of squares already: 10 log10, not 20": 2 * expected,
        "signal over noise: the ratio is upside down": -expected,
        "the range is [-xmax, xmax], 2 xmax wide": expected + 20 * np.log10(2),
        "sigma must be squared": expected - 10 * np.log10(sigma),
    }
    compare("predicted SQNR in dB", f(b, xmax, sigma), expected, mistakes)


# --- groups ---------------------------------------------------------------------------
# The reference computes in float32: a learner's float64 differs in the seventh digit.
FLOAT32 = 1e-5


def _uneven_tensor():
    x = np.random.default_rng(0).standard_normal((3, 10))
    x[:, 3] *= 20
    return x


def _stored(x, b, per, group):
    scheme = Scheme(b, per, group, "symmetric", "float32")
    return quantize(x, scheme).dequantize()[0]


def check_grouped(f):
    """f(x, b, G) -> x_hat (T, D): G consecutive numbers of a row share a scale."""
    x, b, G = _uneven_tensor(), 4, 4
    expected = _stored(x, b, "token", G)
    short = np.array(expected)
    short[:, 8:] = 0
    mistakes = {
        "the last, smaller group is missing: 10 = 4 + 4 + 2": short,
        "one scale serves the whole tensor": _stored(x, b, "tensor", None),
        "one scale serves a whole row": _stored(x, b, "token", None),
        "groups run down a column, not along a row": _stored(x, b, "channel", G),
    }
    what = "x_hat in groups of 4, 4 and 2"
    compare(what, f(x, b, G), expected, mistakes, FLOAT32)


def check_grouped_per_channel(f):
    """f(x, b, G) -> x_hat (T, D): G consecutive numbers of a column share a scale."""
    x, b, G = _uneven_tensor(), 4, 2
    expected = _stored(x, b, "channel", G)
    short = np.array(expected)
    short[2:] = 0
    mistakes = {
        "groups run along a row, not down a column": _stored(x, b, "token", G),
        "the last, smaller group is missing: 3 = 2 + 1": short,
        "one scale serves a whole column": _stored(x, b, "channel", None),
        "one scale serves the whole tensor": _stored(x, b, "tensor", None),
    }
    what = "x_hat in groups of 2 and 1 per column"
    compare(what, f(x, b, G), expected, mistakes, FLOAT32)


def check_ragged_bits(f):
    """f(b, G, D) -> bits: b-bit codes, 16-bit scale and zero per started group."""
    b, G, D = 3, 32, 80
    scheme = Scheme(b, "token", G, "asymmetric")
    expected = scheme.bits_per_element(T=1, D=D)
    mistakes = {
        "80 / 32 groups are 3, not 2.5: a started group has its metadata": b + 32 / G,
        "80 / 32 groups are 3, not 2: round up": b + 32 * 2 / D,
        "the zero is not counted": b + 16 * 3 / D,
        "the metadata is shared by all D numbers: divide by D": b + 32 * 3,
        "these are the bits of the whole row: divide by D": expected * D,
    }
    compare(f"bits per number, b={b}, G={G}, D={D}", f(b, G, D), expected, mistakes)


def check_best_group(f):
    """f(groups, bits, errors, budget) -> the group of least error within the budget."""
    groups = np.array([8, 64, 16, 128, 32])
    bits = np.array([6.0, 4.25, 5.0, 4.125, 4.5])
    errors = np.array([0.01, 0.03, 0.02, 0.05, 0.04])  # 32 is worse than 64 here
    mistakes = {
        "the budget is ignored": 8,
        "this is the smallest group that fits; an error may still be larger": 32,
        "this is the cheapest group, not the best": 128,
        "this is an index; return the group itself": 1,
        "this is the error; return the group that has it": 0.03,
    }
    what = "best group within 4.6 bits per number"
    compare(what, f(groups, bits, errors, 4.6), 64, mistakes)


# --- packing --------------------------------------------------------------------------
def check_unpack_pairs(f):
    """f(packed) -> codes: two 4-bit codes per byte, the first in the low half."""
    codes = np.array([3, 12, 0, 15, 9, 1], np.uint8)
    mistakes = {
        "low and high halves are swapped": codes.reshape(-1, 2)[:, ::-1].ravel(),
        "halves must alternate: low, high, low, high": [3, 0, 9, 12, 15, 1],
        "the high half was not shifted down by 4 bits": [3, 192, 0, 240, 9, 16],
        "the low half still holds the high one: keep 4 bits with & 15": [
            *(195, 12, 240, 15, 25, 1)
        ],
    }
    packed = pack(codes, 4)
    compare("codes of the bytes c3 f0 19", f(packed.copy()), codes, mistakes)


def check_pack_quads(f):
    """f(codes) -> bytes: four 2-bit codes per byte, the first in the lowest bits."""
    codes = np.array([1, 2, 3, 0, 2, 2, 0, 1], np.uint8)
    packed = pack(codes, 2)
    mistakes = {
        "the first code belongs in the lowest bits": [108, 161],
        "each code takes 2 bits: shift by 0, 2, 4, 6": [
            (1 | 2 << 1 | 3 << 2 | 0 << 3),
            (2 | 2 << 1 | 0 << 2 | 1 << 3),
        ],
        "this is the sum of the codes: shift them first": [6, 5],
    }
    compare("bytes of the codes 1 2 3 0 | 2 2 0 1", f(codes.copy()), packed, mistakes)


# --- outliers -------------------------------------------------------------------------
def check_static_share(f):
    """f(x) -> sum_c mean_t(x)^2 / sum_c mean_t(x^2) for one head x (T, D)."""
    x = np.random.default_rng(1).standard_normal((7, 4))
    x += [3.0, -2.0, 0.0, 0.5]
    mean, energy = x.mean(axis=0), (x**2).mean(axis=0)
    share = (mean**2).sum() / energy.sum()
    mistakes = {
        "the mean runs over the channels; it runs over the tokens, axis 0": (
            (x.mean(axis=1) ** 2).sum() / (x**2).mean(axis=1).sum()
        ),
        "square the mean of each channel before you add them": mean.sum()
        / energy.sum(),
        "square first, then add: (sum of the means)^2 is something else": mean.sum()
        ** 2
        / energy.sum(),
        "this is the share that is not static": 1 - share,
        "the energy is a mean over the tokens, as the mean is": (mean**2).sum()
        / (x**2).sum(),
        "add over the channels first, divide then": (mean**2 / energy).mean(),
    }
    compare("static share", f(x.copy()), share, mistakes)


def check_rotated_scores(f):
    """f(q, k_rotated) -> q . k / sqrt(D) from k_rotated = k H. q (D,), k (T, D)."""
    q, *k = np.random.default_rng(2).standard_normal((6, 8))
    H = hadamard_matrix(8)
    k = np.array(k)
    expected = k @ q / np.sqrt(8)
    mistakes = {
        "the query must be rotated like the keys": k @ H @ q / np.sqrt(8),
        "divide by sqrt(D)": k @ q,
        "divide by sqrt(D), not by D": k @ q / 8,
    }
    compare("scores from rotated keys", f(q.copy(), k @ H), expected, mistakes)


def check_smooth(f):
    """f(k) -> (k - m, m), m the mean over tokens: k (H, T, D), m (H, 1, D)."""
    k = np.random.default_rng(3).standard_normal((2, 5, 3))
    k += [9.0, 0.0, -4.0]
    smoothed, m = unpack_answer("smoothing", f(k.copy()), ("k - m", "m"))
    if np.shape(m) == (2, 3):
        raise AssertionError(
            "mean key m: got shape (2, 3), expected (2, 1, 3)\n"
            "likely cause: keepdims=True keeps the token axis, so that k - m fits"
        )
    mistakes = {
        "one mean for all heads: each head has its own": np.broadcast_to(
            k.mean(axis=(0, 1)), (2, 1, 3)
        ),
        "this is the median": np.median(k, axis=1, keepdims=True),
    }
    mean = k.mean(axis=1, keepdims=True)
    compare("mean key m", m, mean, mistakes)
    mistakes = {"m was added": k + mean, "nothing was subtracted": k}
    compare("smoothed keys", smoothed, k - mean, mistakes)


def check_largest_channels(f):
    """f(x, n) -> the n channels with the largest max_t |x|, in any order. x (T, D)."""
    x = np.zeros((4, 6))
    x[:, 1] = 3.0  # large on average
    x[2, 3], x[1, 5], x[0, 0] = -9.0, 4.0, 3.5
    mistakes = {
        "the sign does not count: take the absolute value": [0, 5],
        "this is by the mean of |x|; the equation takes the maximum": [1, 3],
        "these are the smallest ones": [2, 4],
        "these are tokens; take the maximum over axis 0": [1, 2],
    }
    got = f(x.copy(), 2)
    got = np.sort(got) if np.ndim(got) == 1 else got
    compare("the 2 largest channels", got, [3, 5], mistakes)


# --- codebooks ------------------------------------------------------------------------
def check_nearest_code(f):
    """f(y, levels) -> the index of the level nearest to each number; levels sorted."""
    levels = np.array([-3.0, -1.0, 0.0, 0.5, 4.0])
    y = np.array([[-9.0, -2.1, -1.9, -0.4], [0.2, 0.3, 2.2, 2.3]])
    mistakes = {
        "these are the levels; return their indices": levels[
            np.abs(y[..., None] - levels).argmin(-1)
        ],
        "compare with the thresholds, halfway between levels": np.searchsorted(
            levels, y
        ),
        "there is one threshold less than levels": 1
        + np.searchsorted((levels[1:] + levels[:-1]) / 2, y),
    }
    expected = [[0, 0, 1, 2], [2, 3, 3, 4]]
    compare("code of the nearest level", f(y, levels), expected, mistakes)


def check_lloyd_round(f):
    """f(y, levels) -> the mean of the numbers nearest to each level."""
    y = np.array([-4.0, -3.0, -3.5, 0.2, 0.4, 9.0])
    levels = np.array([-3.0, 0.0, 5.0, 8.0])
    expected = [-3.5, 0.3, 5.0, 9.0]
    mistakes = {
        "a level that no number chooses stays where it is": [-3.5, 0.3, 0.0, 9.0],
        "0 / 0: a level that no number chooses stays where it is": [
            *(-3.5, 0.3, np.nan, 9.0)
        ],
        "these are sums; divide by the counts": [-10.5, 0.6, 5.0, 9.0],
        "these are medians of the levels' neighbours, not means of numbers": levels,
    }
    compare("a round of Lloyd's algorithm", f(y, levels), expected, mistakes)


def check_best_scale(f):
    """f(x, levels, factors) -> the s_f = f max|x| / top of the smallest error."""
    levels, factors = np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), np.linspace(0.5, 1.0, 11)
    x = np.array([-0.7, -0.1, 0.8, 1.5, -3.8, 1.5])
    s = factors * 3.8 / 2
    error = (_nearest(x / s[:, None], levels) * s[:, None] - x) ** 2
    expected = s[error.sum(axis=1).argmin()]
    mistakes = {
        "this is the factor; return the scale": expected * 2 / 3.8,
        "divide by the largest level": 2 * expected,
        "this has the largest error": s[error.sum(axis=1).argmax()],
        "add the errors of a group, do not take the largest": s[
            error.max(axis=1).argmin()
        ],
        "this is the largest candidate, not the best": s[-1],
    }
    compare("the best of 11 scales", f(x, levels, factors), expected, mistakes)


def _nearest(y, levels):
    return levels[np.abs(y[..., None] - levels).argmin(axis=-1)]


def check_shared_scale(f):
    """f(x, largest_level) -> 2^(floor(log2 max|x|) - floor(log2 largest_level))."""
    for x, top in (([0.3, -37.0, 2.0], 6.0), ([0.02, 0.05], 6.0), ([-4.0], 448.0)):
        largest = max(map(abs, x))
        exponent = np.floor(np.log2(largest)) - np.floor(np.log2(top))
        mistakes = {
            "this is the exponent; return 2 to its power": exponent,
            "round down, not up": 2.0
            ** (np.ceil(np.log2(largest)) - np.floor(np.log2(top))),
            "round each logarithm, then subtract": 2.0
            ** np.floor(np.log2(largest / top)),
            "take the absolute value": 2.0
            ** (np.floor(np.log2(max(max(x), 1e-9))) - np.floor(np.log2(top))),
            "subtract the exponent of the largest level": 2.0
            ** np.floor(np.log2(largest)),
        }
        what = f"shared scale of {x}, largest level {top}"
        compare(what, f(np.array(x), top), 2.0**exponent, mistakes)


# --- rotation -------------------------------------------------------------------------
def check_fast_hadamard(f):
    """f(x) -> x H for one vector x (D,), D a power of two."""
    for D in (2, 8):
        x = np.random.default_rng(6).standard_normal(D)
        expected = x @ hadamard_matrix(D)
        mistakes = {
            "divide by sqrt(2) in every round": expected * np.sqrt(D),
            "divide by sqrt(2), not by 2": expected / np.sqrt(D),
            "the second half is a - b, not b - a": _swapped_hadamard(x),
            "nothing was added: call the function on a + b and a - b": x,
        }
        compare(f"fast Hadamard transform, D = {D}", f(x.copy()), expected, mistakes)


def _swapped_hadamard(x):
    if len(x) == 1:
        return x
    a, b = np.split(x, 2)
    halves = _swapped_hadamard(a + b), _swapped_hadamard(b - a)
    return np.concatenate(halves) / np.sqrt(2)


def check_store_rotated(f):
    """f(x, levels) -> x_hat: rotated, divided by its RMS, rounded, and back."""
    levels = np.array([-1.63, -0.5, 0.41, 1.5])
    x = np.array([0.3, -4.0, 0.15, 0.9, 0.22, -0.4, 1.1, 0.7])
    H = hadamard_matrix(8)
    y = x @ H
    s = np.sqrt(np.mean(y**2))
    y_hat = s * _nearest(y / s, levels)
    s_max, s_sum = np.abs(y).max() / 1.5, np.sqrt(np.sum(y**2))
    mistakes = {
        "rotate back at the end": y_hat,
        "rotate before rounding": s * _nearest(x / s, levels),
        "multiply by the scale again": _nearest(y / s, levels) @ H,
        "the scale is the root mean square, not the largest number": s_max
        * (_nearest(y / s_max, levels) @ H),
        "the scale is the root of the mean, not of the sum": s_sum
        * (_nearest(y / s_sum, levels) @ H),
        "nothing was rounded": x,
    }
    compare("rotated, rounded, rotated back", f(x.copy(), levels), y_hat @ H, mistakes)


def check_shrink_factor(f):
    """f(x, x_hat) -> sum x x_hat / sum x^2."""
    x, noise = np.random.default_rng(7).standard_normal((2, 3, 5))
    x_hat = 0.8 * x + 0.3 * noise
    dot = np.sum(x * x_hat)
    mistakes = {
        "divide by the energy of x, not of x_hat": dot / np.sum(x_hat**2),
        "divide by sum x^2": dot,
        "this is a ratio of norms; multiply x and x_hat": np.linalg.norm(x_hat)
        / np.linalg.norm(x),
        "this is a correlation; divide by sum x^2": dot
        / (np.linalg.norm(x) * np.linalg.norm(x_hat)),
        "this is the shortfall; return what is left": 1 - dot / np.sum(x**2),
    }
    compare("shrink factor", f(x, x_hat), dot / np.sum(x**2), mistakes)


def check_paper_policies(papers):
    """papers: {"kivi-2", "k4v2", "turbo"} -> Policy."""
    rotated = {"per": "token", "group": None, "transform": "hadamard"}
    expected = {
        "kivi-2": Policy(
            Scheme(2, "channel", 32, "asymmetric"),
            Scheme(2, "token", 32, "asymmetric"),
            residual=128,
        ),
        "k4v2": Policy(
            Scheme(4, levels="asymmetric", **rotated),
            Scheme(2, levels="asymmetric", **rotated),
        ),
        "turbo": Policy(*[Scheme(4, levels="lloyd-max", **rotated)] * 2),
    }
    for name, policy in expected.items():
        _compare_policy(name, papers.get(name), policy)
    print("ok: three papers as policies")


def _compare_policy(name, got, expected):
    """Raise AssertionError that names the first field in which two policies differ."""
    if not isinstance(got, Policy):
        raise AssertionError(f"{name}: got {got!r}; expected a Policy")
    pairs = [(f"{name}: residual", got.residual, expected.residual)]
    for side in ("key", "value"):
        a, b = getattr(got, side), getattr(expected, side)
        pairs += [
            (f"{name}: {side}.{field}", getattr(a, field), getattr(b, field))
            for field in ("bits", "per", "group", "levels", "transform")
        ]
    for what, a, b in pairs:
        if a != b:
            raise AssertionError(f"{what}: got {a!r}, expected {b!r}")


# --- bits in words --------------------------------------------------------------------
def _word_codes(b):
    """40 uneven codes of b bits, and their words as integers."""
    codes = np.random.default_rng(b).integers(0, 2**b, 40)
    codes[[10, 21]] = 2**b - 1  # cut where b = 3: no bit of them may be lost
    row = sum(int(code) << b * i for i, code in enumerate(codes))
    return codes.tolist(), [row >> 32 * w & 0xFFFFFFFF for w in range(-(-40 * b // 32))]


def check_read_code(f):
    """f(words, i, b) -> code i, also where it straddles two words."""
    for b in (4, 3, 5):
        codes, words = _word_codes(b)
        uncut = [words[b * i // 32] >> b * i % 32 & 2**b - 1 for i in range(40)]
        unmasked = [words[b * i // 32] >> b * i % 32 for i in range(40)]
        high = [words[b * i // 32] >> max(32 - b * i % 32 - b, 0) for i in range(40)]
        mistakes = {
            "a code that is cut goes on in the low bits of the next word": uncut,
            "keep b bits: & (2**b - 1)": unmasked,
            "the lowest bits come first": [code & 2**b - 1 for code in high],
        }
        got = [f(list(words), i, b) for i in range(40)]
        compare(f"40 codes of {b} bits read", got, codes, mistakes)


def check_write_word(f):
    """f(codes, w, b) -> word w of the row."""
    for b in (4, 3):
        codes, words = _word_codes(b)
        whole = [
            sum(
                code << b * i - 32 * w
                for i, code in enumerate(codes)
                if 32 * w <= b * i < 32 * w + 32
            )
            for w in range(len(words))
        ]
        mistakes = {
            "the word before may have begun a code: start one code earlier": [
                word & 0xFFFFFFFF for word in whole
            ],
            "a word has 32 bits: cut off what belongs to the next": whole,
            "the lowest bits come first": [
                int(f"{word:032b}"[::-1], 2) for word in words
            ],
        }
        got = [f(list(codes), w, b) for w in range(len(words))]
        compare(f"words of 40 codes of {b} bits", got, words, mistakes, rtol=0)


def check_by_magic(f):
    """f(codes uint16) -> float16 numbers, by an exponent in front of the code."""
    codes = np.array([0, 1, 7, 15, 200, 1023], np.uint16)
    got = f(codes.copy())
    if getattr(got, "dtype", None) != np.float16:
        raise AssertionError(
            f"numbers from codes: got {getattr(got, 'dtype', type(got).__name__)}, "
            "expected float16\nlikely cause: use .view(np.float16), not .astype"
        )
    magic = (codes | np.uint16(25 << 10)).view(np.float16)
    mistakes = {
        "subtract 1024": magic,
        "the exponent stands in front of 10 bits of fraction: 25 << 10": (
            codes | np.uint16(25)
        ).view(np.float16)
        - np.float16(1024),
        "without an exponent these are tiny numbers": codes.view(np.float16),
    }
    compare("numbers from codes", got, codes, mistakes)


def check_paired_word(f):
    """f(eight codes of 4 bits) -> their paired word."""
    codes = [1, 9, 15, 4, 0, 7, 2, 11]
    expected = sum(c << 16 * (e % 2) + 4 * (e // 2) for e, c in enumerate(codes))
    mistakes = {
        "this is the canonical order": sum(c << 4 * e for e, c in enumerate(codes)),
        "the first of a pair stands in the low half": sum(
            c << 16 * (1 - e % 2) + 4 * (e // 2) for e, c in enumerate(codes)
        ),
    }
    compare("paired word", f(list(codes)), expected, mistakes, rtol=0)


def check_join_planes(f):
    """f(low, high) -> the codes of 3 bits."""
    codes = np.arange(8, dtype=np.uint8)[[3, 0, 7, 4, 5, 1, 6, 2]]
    low, high = codes & 3, codes >> 2
    mistakes = {
        "the high bit counts 4: shift it by 2": low | high,
        "the low bits come first": high | low << 1,
        "shift by 2, not by 3": low | high << 3,
    }
    compare("codes of 3 bits", f(low.copy(), high.copy()), codes, mistakes)


# --- threads --------------------------------------------------------------------------
def check_grid_of(f):
    """f(n, block) -> (blocks, idle threads)."""
    for n, block in ((1000, 128), (1024, 128), (1, 256)):
        blocks = -(-n // block)
        mistakes = {
            "round up: the last numbers need a block, too": (
                n // block,
                n // block * block - n,
            ),
            "a multiple needs no extra block": (
                n // block + 1,
                (n // block + 1) * block - n,
            ),
            "idle are the threads that have no number": (blocks, n % block),
        }
        expected = blocks, blocks * block - n
        answer = unpack_answer("grid", f(n, block), ("blocks", "idle threads"))
        compare(f"grid for {n} numbers, {block} a block", answer, expected, mistakes)


def check_dequant_thread(f):
    """f(i, code_of, scale, zero, y, N, T, D, gt, gc) writes y[i], or nothing."""
    N, T, D = 2, 5, 7
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 16, N * T * D)
    for gt, gc in ((1, 3), (2, 1)):
        groups = N, -(-T // gt), -(-D // gc)
        scale, zero = rng.uniform(0.5, 2.0, (2, *groups)).astype(np.float32)
        n, t, c = np.indices((N, T, D))
        spread = (n, t // gt, c // gc)
        expected = scale[spread] * codes.reshape(N, T, D) + zero[spread]
        floor = np.minimum((n * (T // gt) + t // gt) * (D // gc) + c // gc, 2)
        mistakes = {
            "add the zero": scale[spread] * codes.reshape(N, T, D),
            "the last group may be smaller: round the counts up": (
                scale.ravel()[floor] * codes.reshape(N, T, D) + zero.ravel()[floor]
            ),
        }
        y = np.full(N * T * D + 6, np.nan, np.float32)
        for i in range(len(y)):
            if i >= N * T * D:
                _must_not_write(f, i, scale, zero, y, (N, T, D, gt, gc))
                continue
            f(i, codes.item, scale.ravel(), zero.ravel(), y, N, T, D, gt, gc)
        what = f"a thread per number, groups of {gt} x {gc}"
        compare(what, y[: N * T * D].reshape(N, T, D), expected, mistakes)


def _must_not_write(f, i, scale, zero, y, numbers):
    """Raise AssertionError if thread i, which has no number, writes or reads."""
    try:
        f(i, lambda i: 0, scale.ravel(), zero.ravel(), y, *numbers)
    except IndexError:
        written = True
    else:
        written = not np.isnan(y[i])
    if written:
        raise AssertionError(
            f"thread {i}: expected that it returns, got a number or an IndexError\n"
            "likely cause: a thread with i >= N T D has no number; it must return first"
        )


def check_longest_for_int32(f):
    """f(N, D) -> the largest T with N T D - 1 <= 2^31 - 1."""
    for N, D in ((8, 128), (256, 128), (3, 80)):
        mistakes = {
            "the heads count as well": 2**31 // D,
            "an int has a sign: its largest is 2^31 - 1": 2**32 // (N * D),
            "the index begins at 0: the last one is N T D - 1": (2**31 - 1) // (N * D),
            "this is one token too many": 2**31 // (N * D) + 1,
        }
        what = f"longest context for 32 bits, N={N}, D={D}"
        compare(what, f(N, D), 2**31 // (N * D), mistakes, rtol=0)


def check_bytes_per_number(f):
    """f(b, G) -> b / 8 + 4 / G + 4."""
    for b, G in ((4, 64), (3, 32)):
        mistakes = {
            "the number that is written counts, too: 4 bytes": b / 8 + 4 / G,
            "the scale and the zero have 2 bytes each": b / 8 + 2 / G + 4,
            "a scale and a zero serve G numbers": b / 8 + 4 + 4,
            "b bits are b / 8 bytes": b + 4 / G + 4,
        }
        what = f"bytes per number, {b} bits, groups of {G}"
        compare(what, f(b, G), b / 8 + 4 / G + 4, mistakes)


# --- memory ---------------------------------------------------------------------------
def check_sectors(f):
    """f(addresses, width) -> (sectors, ideal) of a warp's request."""
    i = np.arange(32)
    requests = {
        "side by side": (4 * i, 4),
        "twice each": (8 * (i // 2), 8),
        "far apart": (512 * i, 2),
        "not from a sector's start": (16 + 4 * i, 4),
    }
    for name, (addresses, width) in requests.items():
        expected = (
            len(set((addresses // 32).tolist())),
            -(-len(set(addresses.tolist())) * width // 32),
        )
        mistakes = {
            "each sector counts once, however many ask for it": (32, expected[1]),
            "bytes that several ask for count once": (expected[0], width),
            "the ideal is in sectors, not in bytes": (
                expected[0],
                len(set(addresses.tolist())) * width,
            ),
        }
        answer = unpack_answer("sectors", f(addresses, width), ("sectors", "ideal"))
        compare(f"sectors of a request, {name}", answer, expected, mistakes)


def check_word_addresses(f):
    """f(j, b) -> byte addresses of the j-th float16 of word i, for 32 threads."""
    for b in (4, 8):
        i = np.arange(32)
        for j in (0, 3):
            mistakes = {
                "a float16 has 2 bytes": 32 // b * i + j,
                "a word has 32 / b codes": 2 * (b * i + j),
                "thread i begins at number i * 32 / b": 2 * (i + j),
                "load j is j numbers further on": 2 * (32 // b * i),
            }
            expected = 2 * (32 // b * i + j)
            compare(f"addresses of load {j}, {b} bits", f(j, b), expected, mistakes)


def check_wavefronts(f):
    """f(words) -> passes of a warp's request in shared memory."""
    i = np.arange(32)
    requests = {
        "a row": (i, 1),
        "a column of 32": (32 * i, 32),
        "every second word": (2 * i, 2),
        "all the same word": (0 * i + 7, 1),
        "pairs": (32 * (i // 2), 16),
    }
    for name, (words, expected) in requests.items():
        mistakes = {
            "threads that ask for the same word share it": np.bincount(
                words % 32
            ).max(),
            "the busiest bank counts, not the number of banks": len(
                np.unique(words % 32)
            ),
        }
        compare(f"wavefronts of {name}", f(words), expected, mistakes)


def check_sectors_of_row(f):
    """f(r, row_bytes) -> sectors that row r touches."""
    for r, size in ((0, 40), (1, 20), (3, 40), (2, 64), (1, 40)):
        first, last = r * size, (r + 1) * size - 1
        mistakes = {
            "a row may begin in the middle of a sector": -(-size // 32),
            "the last byte of the row is row_bytes - 1 further on": (last + 1) // 32
            - first // 32
            + 1,
            "both ends count: add 1": last // 32 - first // 32,
        }
        what = f"sectors of row {r}, {size} bytes a row"
        compare(what, f(r, size), last // 32 - first // 32 + 1, mistakes)


# --- warps ----------------------------------------------------------------------------
def check_shuffle_xor(f):
    """f(x, m) -> x of lane i ^ m, for each of the 32 lanes i."""
    x, i = np.random.default_rng(9).standard_normal(32), np.arange(32)
    for m in (1, 4, 16):
        mistakes = {
            "the lane's number and m, exclusive or: i ^ m, not i + m": x[(i + m) % 32],
            "these are the lanes; return their x": i ^ m,
            "exclusive or is ^, not |": x[i | m],
        }
        compare(f"exchange with m = {m}", f(x.copy(), m), x[i ^ m], mistakes)


def check_warp_sum(f):
    """f(x) -> the sum of all lanes, in every lane: (32,)."""
    x = np.random.default_rng(10).standard_normal(32)
    total = np.full(32, x.sum())
    mistakes = {
        "every lane has the sum: return 32 numbers": x.sum(),
        "five steps, down to m = 1": x.reshape(16, 2).sum(0)[np.arange(32) % 2],
        "add what came to what was there": x[::-1],
    }
    compare("sum of a warp", f(x.copy()), total, mistakes)


def check_score_by_warp(f):
    """f(q, k) -> q . k in every lane."""
    q, k = np.random.default_rng(11).standard_normal((2, 96))
    part = (q * k).reshape(-1, 32).sum(axis=0)
    mistakes = {
        "the lanes' parts must be added: use warp_sum": part,
        "every lane has the score: return 32 numbers": q @ k,
        "multiply q and k": np.full(32, k.sum()),
        "all channels count, not only the first 32": np.full(32, q[:32] @ k[:32]),
    }
    compare("score by a warp, D = 96", f(q, k), np.full(32, q @ k), mistakes)


def check_softmax_step(f):
    """f(m, l, S) -> (m', l', p) of the online softmax; l, S, p (32,)."""
    S = np.random.default_rng(12).standard_normal((3, 32))
    S += np.array([[0.0], [3.0], [-5.0]])
    m, l = -np.inf, np.zeros(32)  # noqa: E741
    for tile, name in zip(S, ("first", "second", "third"), strict=True):
        new = max(m, tile.max())
        p, shrink = np.exp(tile - new), np.exp(m - new)
        wrong = {
            "the old l shrinks by exp(m - m')": (new, l + p, p),
            "the maximum never falls: m' = max(m, max S)": (
                tile.max(),
                l * np.exp(m - tile.max()) + np.exp(tile - tile.max()),
                np.exp(tile - tile.max()),
            ),
            "subtract the new maximum": (new, l * shrink + np.exp(tile), np.exp(tile)),
        }
        answer = unpack_answer("step", f(m, l.copy(), tile.copy()), ("m", "l", "p"))
        if np.shape(answer[1]) != (32,):
            raise AssertionError(
                f"l: got shape {np.shape(answer[1])}, expected (32,)\n"
                "likely cause: each lane keeps its own part; they are added at the end"
            )
        mistakes = {cause: np.hstack(a) for cause, a in wrong.items()}
        expected = np.hstack((new, l * shrink + p, p))
        compare(f"online softmax, {name} tile", np.hstack(answer), expected, mistakes)
        m, l = new, l * shrink + p  # noqa: E741


def check_neutral(f):
    """f() -> (0 for a sum, -inf for a maximum)."""
    answer = unpack_answer("neutral", f(), ("of a sum", "of a maximum"))
    if tuple(answer) != (0, -np.inf):
        cause = "x + 0 = x, and max(x, -inf) = x for every x"
        if tuple(answer) == (0, 0):
            cause = "all scores may be negative: then 0 would be their maximum"
        raise AssertionError(
            f"neutral numbers: got {answer}, expected others\nlikely cause: {cause}"
        )
    print("ok: what idle lanes contribute")


# --- decode attention -----------------------------------------------------------------
def check_kv_head(f):
    """f(h, H_q, H_kv) -> h // (H_q / H_kv)."""
    for H_q, H_kv in ((9, 3), (8, 2), (5, 5)):
        heads = range(H_q)
        mistakes = {
            "neighbouring query heads share a KV head: divide, not modulo": [
                h % H_kv for h in heads
            ],
            "divide by the ratio H_q / H_kv, not by H_kv": [h // H_kv for h in heads],
        }
        expected = [h // (H_q // H_kv) for h in heads]
        got = [f(h, H_q, H_kv) for h in heads]
        compare(f"KV heads of {H_q} query heads", got, expected, mistakes)


def check_times_read(f):
    """f(H_q, H_kv, per) -> how often each packed byte is read."""
    for H_q, H_kv in ((32, 8), (9, 3)):
        for per, expected in (("query head", H_q // H_kv), ("KV head", 1)):
            mistakes = {
                "each KV head is read by the query heads of its group only": H_q,
                "this is the other kind of kernel": H_q // H_kv // expected,
                "a byte belongs to one KV head": H_kv,
            }
            what = f"reads per byte, once per {per}, {H_q} on {H_kv} heads"
            compare(what, f(H_q, H_kv, per), expected, mistakes)


def check_merge_splits(f):
    """f(m, l, o) -> the output of splits; m, l (n,), o (n, D)."""
    m, l = np.array([2.0, -np.inf, 5.0]), np.array([3.0, 0.0, 1.5])  # noqa: E741
    o = np.array([[1.0, -2.0], [0.0, 0.0], [4.0, 0.5]])
    weight = np.exp(m - 5)
    total = (l * weight).sum()
    mistakes = {
        "divide by l": (o * weight[:, None]).sum(0),
        "l is weighted like o": (o * weight[:, None]).sum(0) / l.sum(),
        "weight each split by exp(m_i - M)": o.sum(0) / l.sum(),
        "subtract the largest maximum": (o * np.exp(m)[:, None]).sum(0)
        / (l * weight).sum(),
    }
    expected = (o * weight[:, None]).sum(0) / total
    compare("merged splits", f(m.copy(), l.copy(), o.copy()), expected, mistakes)


def check_splits_for(f):
    """f(T, groups, wanted, shortest) -> splits."""
    cases = ((8192, 8, 500, 128), (512, 8, 500, 128), (100, 8, 500, 128), (8192, 512))
    for T, groups, wanted, shortest in (*cases[:3], (*cases[3], 500, 128)):
        enough = -(-wanted // groups)
        expected = max(1, min(enough, T // shortest))
        mistakes = {
            "one split at least": min(enough, T // shortest),
            "no split shorter than `shortest`": enough,
            "no more than fill the GPU": max(1, T // shortest),
            "round up: enough blocks for `wanted`": max(
                1, min(wanted // groups, T // shortest)
            ),
        }
        what = f"splits of {T} tokens, {groups} groups"
        compare(what, f(T, groups, wanted, shortest), expected, mistakes)


# --- races and bounds -----------------------------------------------------------------
def check_race(f):
    """f(a, b) -> whether two accesses race: (warp, place, kind, barriers passed)."""
    write = 0, 5, "write", 1
    cases = {
        "another warp reads what was written": ((1, 5, "read", 1), True),
        "another warp writes": ((1, 5, "write", 1), True),
        "another place": ((1, 6, "write", 1), False),
        "the same warp": ((0, 5, "read", 1), False),
        "a barrier is between them": ((1, 5, "read", 2), False),
    }
    reads = (0, 5, "read", 1), (1, 5, "read", 1)
    for name, (a, b), expected in (
        *((name, (write, other), answer) for name, (other, answer) in cases.items()),
        *((name, (other, write), answer) for name, (other, answer) in cases.items()),
        ("two reads", reads, False),
    ):
        got = f(a, b)
        if bool(got) != expected:
            raise AssertionError(
                f"{a} and {b}: got {got!r}, expected {expected}\nlikely cause: {name}"
            )
    print("ok: the rule of a race")


def check_idle_threads(f):
    """f(n, block) -> places of the threads of the last block without a number."""
    for n, block in ((100, 64), (65, 64), (128, 64), (7, 8)):
        busy = n - (n - 1) // block * block
        expected = list(range(busy, block))
        mistakes = {
            "a full last block has no idle thread": list(range(n % block, block)),
            "these are the busy ones": list(range(busy)),
            "these are indices of the grid; return places in the block": list(
                range(n, n + block - busy)
            ),
        }
        compare(f"idle threads, {n} numbers", list(f(n, block)), expected, mistakes)


def check_widest_load(f):
    """f(D) -> 2, 4, 8 or 16 bytes, aligned at the start of every row of D float16."""
    for D in (64, 100, 66, 33):
        expected = max(w for w in (2, 4, 8, 16) if 2 * D % w == 0)
        mistakes = {
            "a float16 has 2 bytes": max(w for w in (1, 2, 4, 8, 16) if D % w == 0),
            "only the first row begins at the start": 16,
            "in bytes, not in numbers": expected // 2,
        }
        compare(f"widest load, D = {D}", f(D), expected, mistakes)


def check_mask_of(f):
    """f(n) -> the mask of lanes 0 .. n - 1."""
    for n in (4, 1, 32, 20):
        mistakes = {
            "this is the bit of one lane: subtract 1": 2**n,
            "this is the bit of the last lane": 2 ** (n - 1),
            "name the lanes that stay": 2**32 - 2**n,
        }
        compare(f"mask of {n} lanes", f(n), 2**n - 1, mistakes, rtol=0)


# --- tensor cores and bandwidth -------------------------------------------------------
def check_products(f):
    """f(T, D, h, cache_is) -> mma.m16n8k16 instructions; cache_is "A" or "B"."""
    for T, D, h, part in ((100, 64, 9, "A"), (100, 72, 9, "B"), (64, 128, 4, "A")):
        tokens, heads = (16, 8) if part == "A" else (8, 16)
        rows, columns, steps = -(-T // tokens), -(-h // heads), -(-D // 16)
        mistakes = {
            "a side that is not filled costs as much: round up": T * h * D / 2048,
            "the channels come 16 at a time": rows * columns,
            "A has 16 rows, B 8 columns": -(-T // heads) * -(-h // tokens) * steps,
            "the heads need their own place": rows * steps,
        }
        what = f"products, {T} tokens, D = {D}, {h} heads, keys are {part}"
        compare(what, f(T, D, h, part), rows * columns * steps, mistakes)


def check_fragment_place(f):
    """f(r, c) -> (lane, register, half) of element (r, c) of A, 16 x 16."""
    r, c = np.indices((16, 16))
    lane, half = 4 * (r % 8) + c % 8 // 2, c % 2
    register = r // 8 + 2 * (c // 8)
    wrong = {
        "register 1 is 8 rows further down, 2 is 8 columns further on": (
            lane,
            2 * (r // 8) + c // 8,
        ),
        "rows g and g + 8 belong to one lane: r % 8": (4 * r + c % 8 // 2, register),
        "columns 2t and 2t + 8 belong to one lane: c % 8": (
            4 * (r % 8) + c // 2,
            register,
        ),
        "a lane holds two neighbouring columns: c % 8 // 2": (
            4 * (r % 8) + c % 4,
            register,
        ),
        "4 lanes share a row: lane = 4 g + t": (r % 8 + 8 * (c % 8 // 2), register),
    }
    names = "lane", "register", "half"
    got = [unpack_answer("place", f(i, j), names) for i in range(16) for j in range(16)]
    compare(
        "lane, register, half of each element",
        np.array(got, np.float64).reshape(16, 16, 3),
        np.stack([lane, register, half], axis=-1),
        {cause: np.stack([*a, half], axis=-1) for cause, a in wrong.items()},
    )


def check_undo_magic(f):
    """f(n) -> (2^-n, -2^(10 - n)): 1024 + 2^n code becomes the code."""
    for n in (0, 4, 3):
        expected = 2.0**-n, -(2.0 ** (10 - n))
        mistakes = {
            "the factor multiplies the 1024 as well": (2.0**-n, -1024),
            "divide by 2^n": (2.0**n, -1024 * 2.0**n),
            "take the 1024 off, do not add it": (2.0**-n, 2.0 ** (10 - n)),
            "n bits higher is 2^n times as large": (1 / (n or 1), -1024 / (n or 1)),
        }
        answer = unpack_answer("undo", f(n), ("factor", "constant"))
        compare(f"factor and constant, n = {n}", answer, expected, mistakes)


def check_folded_output(f):
    """f(p, levels, s, z) -> o (D,), o_c = sum_t p_t (s_tj level_tc + z_tj)."""
    rng = np.random.default_rng(21)
    T, n, width = 7, 3, 4
    p, levels = (
        rng.uniform(0.1, 1, T),
        rng.integers(0, 16, (T, n * width)).astype(float),
    )
    s, z = rng.uniform(0.5, 2, (2, T, n))
    j = np.repeat(np.arange(n), width)
    tiled = np.tile(np.arange(n), width)
    mistakes = {
        "the zeros are missing: sum_t p_t z_tj": p @ (s[:, j] * levels),
        "the zeros are weighted by p as well": p @ (s[:, j] * levels) + z.sum(0)[j],
        "neighbouring channels share a group: j = c // G": (
            p @ (s[:, tiled] * levels + z[:, tiled])
        ),
        "the zeros are not multiplied by s": p @ (s[:, j] * (levels + z[:, j])),
        "each token has its own scale": p @ levels * s.mean(0)[j] + (p @ z)[j],
    }
    expected = p @ (s[:, j] * levels + z[:, j])
    got = f(p.copy(), levels.copy(), s.copy(), z.copy())
    compare("output with folded scales", got, expected, mistakes)


def check_power_for(f):
    """f(x, n) -> the power of two that takes x > 0 into [2^(n - 1), 2^n)."""
    x, n = np.array([3.0, 0.7, 108000.0, 4.0, 0.25]), 14
    expected = 2.0 ** (n - np.frexp(x)[1])
    mistakes = {
        "a power of two times itself would reach 2^n: x = 2^k": (
            2.0 ** (n - np.ceil(np.log2(x)))
        ),
        "this takes x below 2^(n - 1)": expected / 2,
        "this takes x to 2^n or above": expected * 2,
        "this factor is no power of two, and rounds": 2.0**n / x,
        "this is the exponent": n - np.frexp(x)[1],
    }
    compare("powers of two", [f(float(y), n) for y in x], expected, mistakes, rtol=0)


def check_kernel_seconds(f):
    """f(n, i, B, J, t0) -> t0 + max(n / B, i n / J)."""
    n, B, J, t0 = 3e8, 4e12, 3e13, 5e-6
    for i in (3.5, 27):
        mistakes = {
            "the start counts, too": max(n / B, i * n / J),
            "what overlaps is not added: take the slower": t0 + n / B + i * n / J,
            "i instructions for each byte": t0 + max(n / B, i / J),
            "the slower one decides, not the faster": t0 + min(n / B, i * n / J),
        }
        expected = t0 + max(n / B, i * n / J)
        what = f"seconds of a kernel with {i} instructions per byte"
        compare(what, f(n, i, B, J, t0), expected, mistakes)


def check_long_speedup(f):
    """f(b, G, i, B, J) -> (2 / B) / (n max(1 / B, i / J)), n = (b + 32 / G) / 8."""
    B, J = 4e12, 3e13
    for b, G, i in ((4, 64, 3.5), (2, 32, 19)):
        n = (b + 32 / G) / 8
        slower = max(1 / B, i / J)
        mistakes = {
            "a scale and a zero for G numbers: 32 / G bits": 2 / B / (b / 8 * slower),
            "the instructions count as well": 2 / n,
            "this is the ratio upside down": n * slower * B / 2,
            "bits and bytes are mixed": 2 / B / (8 * n * slower),
            "i is per byte, and a number has n bytes": 2 / B / max(n / B, i / J),
        }
        what = f"speed-up, {b} bits, G = {G}, {i} instructions per byte"
        compare(what, f(b, G, i, B, J), 2 / B / (n * slower), mistakes)


def check_bytes_for_share(f):
    """f(x, B, t0) -> x / (1 - x) t0 B."""
    B, t0 = 4e12, 5e-6
    for x in (0.9, 0.25):
        mistakes = {
            "t0 is a part of the whole time: divide by 1 - x": x * t0 * B,
            "this is the time, not the bytes": x / (1 - x) * t0,
            "x is the share of reading, 1 - x that of the start": (1 - x) / x * t0 * B,
            "this is for the whole time, with the start": t0 * B / (1 - x),
        }
        what = f"bytes for {x:.0%} of the bandwidth"
        compare(what, f(x, B, t0), x / (1 - x) * t0 * B, mistakes)


def check_half_gain_tokens(f):
    """f(a, r, t0) -> r t0 / a."""
    t0 = 5e-6
    for a, r in ((8e-9, 3.5), (2e-9, 6.4)):
        mistakes = {
            "the small cache takes a T / r: multiply by r": t0 / a,
            "this is for reading 16 bits r times faster": t0 / (a * r),
            "half of the gain, not of the speed-up": (r / 2 - 1) / a * t0 / (1 - 1 / 2),
            "all terms have t0: divide the bytes' time by it": r / a,
        }
        what = f"tokens for half of the gain, {r} times smaller"
        compare(what, f(a, r, t0), r * t0 / a, mistakes)


def check_summary(f):
    """f(seconds) -> (median, (x75 - x25) / x50)."""
    x = [3.0, 2.5, 90.0, 2.0, 2.25]
    low, middle, high = np.percentile(x, (25, 50, 75))
    mistakes = {
        "the mean follows one bad round: take the median": (
            np.mean(x),
            (high - low) / np.mean(x),
        ),
        "sort first: the median is the middle of the sorted times": (
            x[2],
            (high - low) / x[2],
        ),
        "divide by the median": (middle, high - low),
        "quartiles, not the extremes": (middle, (max(x) - min(x)) / middle),
        "quartiles, not the standard deviation": (middle, np.std(x) / middle),
    }
    answer = unpack_answer("summary", f(list(x)), ("median", "spread"))
    compare("median and spread", answer, (middle, (high - low) / middle), mistakes)


def check_bytes_moved(f):
    """f(n, b, G) -> (4 n, packed + 8 n, packed), packed = n (b + 32 / G) / 8."""
    for n, b, G in ((1000, 4, 64), (3000, 2, 32)):
        full, packed = 4 * n, n * (b + 32 / G) / 8
        mistakes = {
            "what is written must be read again": (full, packed + full, packed),
            "the packed cache is read as well": (full, 2 * full, packed),
            "scales and zeros are bytes, too": (
                full,
                n * b / 8 + 2 * full,
                n * b / 8,
            ),
            "a byte has 8 bits": (full, 8 * packed + 2 * full, 8 * packed),
            "a float32 number has 4 bytes": (2 * n, packed + 4 * n, packed),
        }
        names = "float32", "dequantized", "packed"
        answer = unpack_answer("bytes", f(n, b, G), names)
        expected = full, packed + 2 * full, packed
        compare(f"bytes moved, {b} bits, G = {G}", answer, expected, mistakes)


def check_crossover(f):
    """f(tokens, a, b) -> the first of tokens from which on b < a, or None."""
    tokens = 64, 128, 256, 512
    a = [1.0, 2.0, 4.0, 8.0]
    for name, b, expected in (
        ("faster from 256 on", [2.0, 2.5, 3.0, 4.0], 256),
        ("faster once, then not, then for good", [0.9, 2.5, 3.0, 4.0], 256),
        ("always faster", [0.5, 1.0, 2.0, 3.0], 64),
        ("equal is not faster", [1.0, 2.0, 4.0, 7.0], 512),
        ("never faster", [2.0, 3.0, 5.0, 9.0], None),
        ("faster, but not at the end", [0.5, 1.0, 2.0, 9.0], None),
    ):
        got = f(tokens, list(a), list(b))
        if got != expected:
            raise AssertionError(
                f"times {a} and {b}: got {got!r}, expected {expected}\n"
                f"likely cause: {name}"
            )
    print("ok: crossover")


# --- fast on a CPU --------------------------------------------------------------------
def check_block_place(f):
    """f(t, d, bits) -> (panel, row, lane, byte, plane) of a key's code in a block."""
    names = "panel", "row", "lane", "byte", "plane"
    for bits, D in ((4, 24), (8, 12), (2, 48)):
        t, d = (a.ravel() for a in np.indices((96, D)))
        p = 8 // bits
        row, rest = d // (4 * p), d % (4 * p)
        right = t // 32, row, t % 32, rest % 4, rest // 4
        wrong = {
            "neighbouring channels go to neighbouring bytes: 4 plane + byte": (
                *right[:3],
                rest // p,
                rest % p,
            ),
            "a word holds 4 p = 32 / bits channels of a token": (
                t // 32,
                d // p,
                t % 32,
                *right[3:],
            ),
            "tokens of a panel are neighbours: panel = t // 32": (
                t % 3,
                row,
                t // 3,
                *right[3:],
            ),
            "a panel has 32 lanes, the next tokens another one": (
                0 * t,
                row,
                t,
                *right[3:],
            ),
            "planes count fields, not bits": (*right[:4], bits * right[4]),
            "the fields of a word follow the row: d % (32 / bits)": (
                *right[:3],
                d % 4,
                d // 4,
            ),
        }
        answers = zip(t.tolist(), d.tolist(), strict=True)
        got = [unpack_answer("place", f(*at, bits), names) for at in answers]
        compare(
            f"panel, row, lane, byte, plane of each code of {bits} bits",
            np.array(got, np.float64),
            np.stack(right, axis=1),
            {cause: np.stack(a, axis=1) for cause, a in wrong.items()},
        )


def check_bounds(f):
    """f(h, beta, J, B) -> (J / h, 8 B / beta): cached numbers per second."""
    J, B = 7e10, 1.1e10
    for h, beta in ((4, 4.5), (3, 8.25)):
        mistakes = {
            "each number meets h query heads: divide by h": (J, 8 * B / beta),
            "more heads are more work for a number, not less": (J * h, 8 * B / beta),
            "a byte has 8 bits": (J / h, B / beta),
            "beta is in bits, B in bytes": (J / h, B / (8 * beta)),
            "one read of a number serves all h heads": (J / h, 8 * B / (beta * h)),
            "this is bytes per second": (J / h, B),
            "numbers per second, not seconds per number": (h / J, beta / (8 * B)),
        }
        answer = unpack_answer("bounds", f(h, beta, J, B), ("by work", "by bytes"))
        what = f"numbers per second, {h} heads, {beta} bits"
        compare(what, answer, (J / h, 8 * B / beta), mistakes)


def check_fold(f):
    """f(q, s, z) -> (x, y) = (q s, q . z)."""
    rng = np.random.default_rng(36)
    q, z = rng.standard_normal((2, 5))
    s = rng.uniform(0.5, 2, 5)

    def flat(x, y):
        return np.append(np.broadcast_to(x, 5), y)

    mistakes = {
        "the zeros meet the query, not x": flat(q * s, (q * s) @ z),
        "a zero counts as often as its query number: q . z": flat(q * s, z.sum()),
        "the zeros are missing: y = q . z": flat(q * s, 0),
        "the code was divided by s, so the query is multiplied": flat(q / s, q @ z),
        "the zeros are one number y, not a part of x": flat(q * s + z, q @ z),
        "x is a number for each channel, not their sum": flat(q @ s, q @ z),
    }
    x, y = unpack_answer("fold", f(q.copy(), s.copy(), z.copy()), ("x", "y"))
    if np.ndim(y) or np.shape(x) not in ((5,), ()):
        raise AssertionError(
            f"fold: expected x of shape (5,) and one number y, got shapes "
            f"{np.shape(x)} and {np.shape(y)}"
        )
    compare("x (5 numbers) and y", flat(x, y), flat(q * s, q @ z), mistakes)


def check_round_row(f):
    """f(x, levels, bits) -> (a, Q, (2^bits - 1) / 2 sum rest), rest = x - a Q."""
    x = np.array([0.9, -3.1, 1.37, 0.05, 2.2, -0.71, 2.9])
    for levels, bits in ((127, 4), (255, 8)):
        a = np.abs(x).max() / levels
        Q = np.rint(x / a)
        rest, m = (x - a * Q).sum(), (2**bits - 1) / 2

        def flat(a, Q, back):
            return np.concatenate([[a], Q, [back]])

        cut, signed = np.trunc(x / a), x.max() / levels
        Q_signed = np.rint(x / signed)
        mistakes = {
            "round, do not cut off": flat(a, cut, m * (x - a * cut).sum()),
            "the largest |x|, negative numbers as well": flat(
                signed, Q_signed, m * (x - signed * Q_signed).sum()
            ),
            "the middle code is (2^bits - 1) / 2": flat(a, Q, 2**bits / 2 * rest),
            "the middle code, not the largest one": flat(a, Q, 2 * m * rest),
            "the middle code is that of the codes, bits wide": flat(
                a, Q, levels / 2 * rest
            ),
            "the rest is x - a Q, with its sign": flat(a, Q, -m * rest),
            "the sum of the rest, not of its size": flat(
                a, Q, m * np.abs(x - a * Q).sum()
            ),
            "what is owed is counted for the middle code: multiply": flat(a, Q, rest),
        }
        got = unpack_answer("round_row", f(x.copy(), levels, bits), ("a", "Q", "back"))
        compare(
            f"step, bytes and pay-back, {levels} levels, codes of {bits} bits",
            flat(got[0], np.reshape(got[1], -1), got[2]),
            flat(a, Q, m * rest),
            mistakes,
        )


# --- keys versus values ---------------------------------------------------------------
def check_weight_moved(f):
    """f(S, delta) -> TV = (1/2) sum_j |softmax(S + delta)_j - softmax(S)_j|."""
    S = np.array([4.0, 3.8, 1.0, -2.0])
    delta = np.array([-0.2, 0.3, 0.9, 0.1])
    change = softmax(S + delta) - softmax(S)
    raw = np.exp(S + delta) - np.exp(S)
    mistakes = {
        "what one token loses another one gains: halve the sum": np.abs(change).sum(),
        "add the absolute changes: with their signs they add up to 0": change.sum() / 2,
        "divide exp(S) by its sum: weights add up to 1": np.abs(raw).sum() / 2,
        "this is the largest change of one token": np.abs(change).max(),
        "this is the mean; the equation has a sum": np.abs(change).mean() / 2,
        "delta is added to S, it does not replace it": np.abs(
            softmax(delta) - softmax(S)
        ).sum()
        / 2,
    }
    expected = np.abs(change).sum() / 2
    compare("weight that moves", f(S.copy(), delta.copy()), expected, mistakes)


def check_logit_bound(f):
    """f(q, s) -> sum_c |q_c| s / (2 sqrt(D)): the most a logit can move. q (D,)."""
    q, s = np.array([1.0, -2.0, 0.5, 3.0, -0.25, 0.0, 1.5]), 0.3
    D, total = len(q), np.abs(q).sum()
    mistakes = {
        "take absolute values before you add: errors can have any sign": abs(q.sum())
        * s
        / 2
        / np.sqrt(D),
        "an error is at most half a step": total * s / np.sqrt(D),
        "logits are divided by sqrt(D)": total * s / 2,
        "divide by sqrt(D), not by D": total * s / 2 / D,
        "this uses the length of q (2-norm); the worst case adds all |q_c|": (
            np.linalg.norm(q) * s / 2 / np.sqrt(D)
        ),
    }
    expected = total * s / 2 / np.sqrt(D)
    compare("largest move of a logit", f(q.copy(), s), expected, mistakes)


def check_value_error(f):
    """f(p, eps) -> sqrt(sum_j p_j^2 eps_j^2): p weights, eps rms errors, both (T,)."""
    p, eps = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.1, 0.4, 0.2, 0.8])
    mistakes = {
        "errors of different signs cancel in part: add squares, not errors": p @ eps,
        "the weight must be squared as well": np.sqrt(p @ eps**2),
        "take the square root of the sum": np.sum(p**2 * eps**2),
        "this leaves the errors out": np.sqrt(np.sum(p**2)),
        "divide by nothing: the weights do the averaging": np.sqrt(
            np.mean(p**2 * eps**2)
        ),
    }
    expected = np.sqrt(np.sum(p**2 * eps**2))
    compare("expected error of the output", f(p.copy(), eps.copy()), expected, mistakes)


def check_safe_step(f):
    """f(q, distance) -> the s with 2 * (sum_c |q_c| s / (2 sqrt(D))) = distance."""
    q, distance = np.array([1.0, -2.0, 0.5, 3.0, -0.25]), 0.2
    total, root = np.abs(q).sum(), np.sqrt(5)
    mistakes = {
        "both scores move: twice the bound must fit": 2 * distance * root / total,
        "sqrt(D) is missing": distance / total,
        "solve for s: sqrt(D) belongs on top": distance / root / total,
        "take absolute values before you add": distance * root / q.sum(),
    }
    compare(
        "largest safe step", f(q.copy(), distance), distance * root / total, mistakes
    )


# --- the streaming cache --------------------------------------------------------------
def check_split(f):
    """f(T, R, G) -> (quantized, window): tokens leave a window of R in groups of G."""
    for T, R, G in ((200, 32, 24), (31, 32, 24), (56, 32, 24), (55, 32, 24), (0, 0, 8)):
        whole = max(T - R, 0) // G * G
        mistakes = {
            "the newest R tokens stay in full precision": (T // G * G, T % G),
            "only whole groups leave: round down to a multiple of G": (
                *(max(T - R, 0), min(T, R)),
            ),
            "with fewer than R tokens nothing is quantized: no negative counts": (
                *((T - R) // G * G, T - (T - R) // G * G),
            ),
            "this counts groups; return tokens": (whole // G, T - whole),
            "the order is (quantized, window)": (T - whole, whole),
            "what is not quantized is all in the window: T - quantized": (whole, R),
        }
        answer = unpack_answer("split", f(T, R, G), ("quantized", "window"))
        what = f"quantized and window, T={T}, R={R}, G={G}"
        compare(what, answer, (whole, T - whole), mistakes)


def check_stored_bits(f):
    """f(arrays, n) -> stored bits per number of a cache that holds n numbers."""
    arrays = [np.zeros((3, 5), np.uint8), np.zeros(5, np.float16), np.zeros((2, 3))]
    n = 30
    mistakes = {
        "a byte has 8 bits": sum(a.nbytes for a in arrays) / n,
        "count bytes, not elements: dtypes differ": sum(a.size for a in arrays) * 8 / n,
        "count every array, not only the first": arrays[0].nbytes * 8 / n,
        "divide by the numbers that the cache stands for, n": sum(
            a.nbytes for a in arrays
        )
        * 8,
        "float16 has two bytes, float64 eight: use nbytes": sum(a.size for a in arrays)
        * 16
        / n,
    }
    expected = 8 * sum(a.nbytes for a in arrays) / n
    compare("stored bits per number", f(list(arrays), n), expected, mistakes)


def check_block_key(f):
    """f(tenant, scheme, tokens) -> hashable: blocks may be shared if keys are equal."""
    scheme = Scheme(4, "channel", 8)
    base = ("tenant a", scheme, (5, 17, 3))
    others = {
        "tenant": ("tenant b", scheme, (5, 17, 3)),
        "scheme": ("tenant a", Scheme(2, "channel", 8), (5, 17, 3)),
        "order of the tokens": ("tenant a", scheme, (17, 5, 3)),
        "last token": ("tenant a", scheme, (5, 17, 4)),
        "number of tokens": ("tenant a", scheme, (5, 17)),
    }
    key = f(*base)
    try:
        hash(key)
    except TypeError:
        raise AssertionError(
            f"block key: got {type(key).__name__}, expected what a dict can look up\n"
            "likely cause: a list; a tuple can be a key"
        ) from None
    if key is None or key != f("tenant a", Scheme(4, "channel", 8), (5, 17, 3)):
        raise AssertionError(
            f"block key: got {key!r} and another one for the same tenant, scheme and "
            "tokens; expected the same key\n"
            "likely cause: id() or a counter is part of the key, or nothing is returned"
        )
    for what, arguments in others.items():
        if key == f(*arguments):
            raise AssertionError(
                f"block key: got the same key for blocks that differ in the {what}, "
                "expected two\n"
                f"likely cause: the {what} is not part of the key"
            )
    print("ok: block key")


# --- planning -------------------------------------------------------------------------
def check_tokens_held(f):
    """f(T, growing, sliding, W) -> growing * T + sliding * min(T, W)."""
    growing, sliding, W = 3, 5, 40
    for T in (100, 25):
        mistakes = {
            "sliding layers are not counted: they hold tokens, too": growing * T,
            "a sliding layer holds no more than W tokens": (growing + sliding) * T,
            "before the window is full, a sliding layer holds T tokens": growing * T
            + sliding * W,
            "the layers that grow hold all T tokens": (growing + sliding) * min(T, W),
        }
        expected = growing * T + sliding * min(T, W)
        what = f"tokens held, T={T}, W={W}"
        compare(what, f(T, growing, sliding, W), expected, mistakes)


def check_users_sharing(f):
    """f(free, token_bytes, prefix, own) -> floor((free - P c) / (o c)), at least 0."""
    for free, c, P, o in ((1_000_000, 544, 640, 48), (300_000, 544, 640, 48)):
        mistakes = {
            "the prefix takes room, once": free // (o * c),
            "the prefix is stored once, not once per user": free // ((P + o) * c),
            "a part of a user is no user: round down": max(free - P * c, 0) / (o * c),
            "a prefix that does not fit leaves room for 0 users": (free - P * c)
            // (o * c),
            "P and o are tokens: multiply both by the bytes of a token": max(
                free - P, 0
            )
            // o,
        }
        expected = max(free - P * c, 0) // (o * c)
        what = f"users beside a prefix of {P} tokens, {free:,} bytes free"
        compare(what, f(free, c, P, o), expected, mistakes)


def check_step_speedup(f):
    """f(W, C, r) -> (W + C) / (W + C / r)."""
    W, C, r = 16.0, 24.0, 3.76
    mistakes = {
        "the weights are read as well, before and after": r,
        "the weights stay as they are: only C is divided by r": (W + C)
        / (W / r + C / r),
        "this is the ratio upside down": (W + C / r) / (W + C),
        "C shrinks to C / r, it does not vanish": (W + C) / W,
        "this is the new time, not the ratio": W + C / r,
    }
    expected = (W + C) / (W + C / r)
    compare("speed-up of a step", f(W, C, r), expected, mistakes)


def check_binding_bits(f):
    """f(c, B, J) -> 8 c B / J."""
    c, B, J = 1.9, 4.8e12, 33.5e12
    expected = 8 * c * B / J
    mistakes = {
        "this is in bytes: a byte has 8 bits": expected / 8,
        "b / (8 B) = c / I: solve for b": J / (8 * c * B),
        "B belongs on top, J below": 8 * c * J / B,
        "the instructions per number are missing": 8 * B / J,
    }
    compare("bits below which instructions bind", f(c, B, J), expected, mistakes)


# --- formats of other systems ---------------------------------------------------------
def check_read_q4_0(f):
    """f(block of 18 bytes) -> 32 numbers d (code - 8): codes j and j + 16 in byte j."""
    codes = np.array([(7 * j + j // 16 + 3) % 16 for j in range(32)])
    packed = (codes[:16] | codes[16:] << 4).astype(np.uint8)
    d = np.array([-0.375], "<f2")
    block = d.tobytes() + packed.tobytes()
    pairs = np.stack([packed & 15, packed >> 4], axis=1).ravel()
    mistakes = {
        "byte j holds the codes j and j + 16, not 2j and 2j + 1": -0.375
        * (pairs - 8.0),
        "8 must be subtracted from the codes": -0.375 * codes,
        "low and high halves are swapped": -0.375 * (np.roll(codes, 16) - 8.0),
        "these are the codes: multiply by d": codes - 8.0,
        "d is little-endian: '<f2'": float(d.byteswap()[0]) * (codes - 8.0),
        "unsigned codes wrap around below 8: make them floats first": -0.375
        * ((codes - 8) % 256),
    }
    got = f(block)
    compare("32 numbers of a q4_0 block", got, -0.375 * (codes - 8.0), mistakes)


def check_repack(f):
    """f(16 bytes of q4_0) -> 16 bytes: code 2i low, code 2i + 1 high in byte i."""
    codes = np.array([(5 * j + j // 16 + 1) % 16 for j in range(32)])
    packed = (codes[:16] | codes[16:] << 4).astype(np.uint8)
    low, high = codes[0::2], codes[1::2]
    mistakes = {
        "nothing changed: byte i must hold the codes 2i and 2i + 1": packed,
        "code 2i belongs in the low half": high | low << 4,
        "shift the odd codes up by 4 bits": low | high,
    }
    got = f(packed.copy())
    compare("bytes in the order of vLLM", got, low | high << 4, mistakes)


def check_open_word(f):
    """f(word uint32) -> (s, z): z the low 4 bits, s the float32 of the other bits."""
    s = np.array([0.5, 6.3333335, 1e-6, 0.0712], np.float32)
    s = (s.view(np.uint32) & ~np.uint32(15)).view(np.float32)
    z = np.array([9, 0, 15, 7], np.uint32)
    word = s.view(np.uint32) | z
    got_s, got_z = unpack_answer("word", f(word.copy()), ("s", "z"))
    mistakes = {
        "keep 4 bits with & 15": word & 7,
        "the zero is in the low bits, not in the high ones": word >> 28,
    }
    compare("zero z", got_z, z, mistakes)
    mistakes = {
        "this is the integer: read its bits as float32 with .view": word - z,
        "clear the low 4 bits before you read the float": word.view(np.float32),
    }
    compare("scale s", got_s, s, mistakes, rtol=1e-9)


def check_scale_offset(f):
    """f(t, s, S) -> (t // 4) 4 S + 4 s + t mod 4."""
    S = 5
    t, s = np.divmod(np.arange(12 * S), S)
    expected = t // 4 * 4 * S + 4 * s + t % 4
    mistakes = {
        "in four tokens the token changes fastest, this has them in order": t * S + s,
        "t // 4 is rounded down before it is multiplied": t * S + 4 * s + t % 4,
        "four tokens have 4 S scales": t // 4 * S + 4 * s + t % 4,
    }
    compare("places of the scales of 12 tokens", f(t, s, S), expected, mistakes)


# --- paging and prefixes --------------------------------------------------------------
def check_locate(f):
    """f(t, table, B) -> (block id, place): where token t of a paged sequence is."""
    table, B = [7, 2, 9, 4], 10
    for t in (37, 0, 10, 29):
        n, place = divmod(t, B)
        mistakes = {
            "this is the position in the table; the id stands there": (n, place),
            "the order is (block id, place)": (place, table[n]),
            "the place is counted from the beginning of the block": (table[n], t),
            "places and blocks are counted from 0": (table[n], place + 1),
        }
        answer = unpack_answer("locate", f(t, list(table), B), ("block id", "place"))
        what = f"block and place of token {t}, B={B}"
        compare(what, answer, (table[n], place), mistakes)


def check_encode(f):
    """f(*fields) -> str or bytes that differ for any two different tuples of fields."""
    run_together = "the fields run together: put the length of each before it"
    separator = "a separator may occur in a field; a length in front cannot be mistaken"
    no_type = "the type is missing: 1, '1' and True are different fields"
    pairs = [
        (("ab", "c"), ("a", "bc"), run_together),
        ((1, 23), (12, 3), run_together),
        (("a", None), ("aNone",), run_together),
        *((("a" + x, "b"), ("a", x + "b"), separator) for x in ",;:|/ -_\n\0"),
        *(((f"a{x}b",), ("a", "b"), separator) for x in ",;:|/ -_\n\0"),
        ((1,), ("1",), no_type),
        ((1,), (True,), no_type),
        ((None,), ("None",), no_type),
        (("a", "b"), ("b", "a"), "the order of the fields counts"),
        ((), ("",), "an empty field is a field"),
        (("a", ""), ("", "a"), "an empty field has a place"),
    ]
    for a, b, cause in pairs:
        if type(f(*a)) not in (str, bytes) or f(*a) != f(*a):
            raise AssertionError(
                f"encode{a}: got {f(*a)!r} and {f(*a)!r}, expected the same text\n"
                "likely cause: nothing is returned, or more than the fields goes in"
            )
        if f(*a) == f(*b):
            raise AssertionError(
                f"encode{a} and encode{b}: got {f(*a)!r} twice, expected two texts\n"
                f"likely cause: {cause}"
            )
    print("ok: different fields, different texts")


def check_usable_blocks(f):
    """f(T, R, B, stored) -> blocks a request of T tokens may take of those stored."""
    cases = (508, 128, 32, 15), (100, 0, 10, 99), (20, 64, 16, 3), (207, 16, 16, 4)
    for T, R, B, stored in cases:
        expected = min(min(max(T - R, 0), T - 1) // B, stored)
        mistakes = {
            "the newest R tokens are in the window, in full precision": min(
                (T - 1) // B, stored
            ),
            "the last token must be computed, whatever is stored": min(
                max(T - R, 0) // B, stored
            ),
            "no more blocks than the index has": min(max(T - R, 0), T - 1) // B,
            "a block that is not whole cannot be taken: round down": min(
                -(-min(max(T - R, 0), T - 1) // B), stored
            ),
            "this counts tokens; return blocks": expected * B,
            "with fewer than R tokens there is nothing to take": min(
                (T - R) // B, stored
            ),
        }
        what = f"usable blocks, T={T}, R={R}, B={B}, stored={stored}"
        compare(what, f(T, R, B, stored), expected, mistakes)


# --- what a quantized cache costs a model ---------------------------------------------
def check_perplexity(f):
    """f(nll) -> exp(mean nll)."""
    nll = np.array([0.3, 5.1, 2.2, 0.05, 3.0])
    expected = np.exp(nll.mean())
    mistakes = {
        "take the mean first, then exp": np.exp(nll).mean(),
        "this is the mean of -ln p: exp is missing": nll.mean(),
        "this is 1 / perplexity: nll has the minus sign already": 1 / expected,
        "nll is in nats: exp, not 2 to the power": 2 ** nll.mean(),
        "the mean, not the sum": np.exp(nll.sum()),
    }
    compare("perplexity", f(nll.copy()), expected, mistakes)


def check_paired_change(f):
    """f(nll, nll_hat) -> (change, se) in percent, from d = nll_hat - nll.

    change = 100 (exp(mean d) - 1), se = 100 std(d) / sqrt(n).
    """
    nll = np.array([0.3, 5.1, 2.2, 0.05, 3.0, 1.1])
    nll_hat = nll + np.array([0.02, 0.3, -0.1, 0.01, 0.25, 0.0])
    n, d = len(nll), nll_hat - nll
    change, se = unpack_answer(
        "change", f(nll.copy(), nll_hat.copy()), ("change", "se")
    )
    expected = 100 * np.expm1(d.mean())
    mistakes = {
        "in percent: times 100": expected / 100,
        "the sign: more nll means a higher perplexity": 100 * np.expm1(-d.mean()),
        "subtract 1: this is the ratio of the perplexities": expected + 100,
        "this is the change of the mean nll in percent of it": (
            100 * d.mean() / nll.mean()
        ),
        "mean d is the change of ln(perplexity): take exp": 100 * d.mean(),
    }
    compare("change in percent", change, expected, mistakes)
    spread = d.std(ddof=1)
    two = np.hypot(nll.std(ddof=1), nll_hat.std(ddof=1)) / np.sqrt(n)
    mistakes = {
        "the standard error is that of the mean: divide by sqrt(n)": 100 * spread,
        "divide by sqrt(n), not by n": 100 * spread / n,
        "in percent: times 100": spread / np.sqrt(n),
        "the differences of pairs, not two spreads added": 100 * two,
        "this is the spread of nll_hat; take that of d": (
            100 * nll_hat.std(ddof=1) / np.sqrt(n)
        ),
    }
    compare("standard error", se, 100 * spread / np.sqrt(n), mistakes, rtol=0.1)


def check_verdict(f):
    """f(change, se, low, high) -> "true", "false" or "cannot tell".

    Where change - 2 se .. change + 2 se lies: inside low .. high, outside, or neither.
    """
    cases = (
        (2.0, 0.3, "true", "all of 1.4 .. 2.6 is in 1 .. 3"),
        (23.1, 1.5, "false", "20.1 .. 26.1 lies above 3"),
        (0.2, 0.15, "false", "-0.1 .. 0.5 lies below 1: less than the claim says"),
        (3.3, 0.6, "cannot tell", "2.1 .. 4.5 holds numbers on both sides of 3"),
        (2.0, 0.7, "cannot tell", "the interval is +- 2 se, not +- 1: 0.6 .. 3.4"),
        (1.2, 0.3, "cannot tell", "0.6 .. 1.8 holds numbers on both sides of 1"),
        (2.0, 4.0, "cannot tell", "-6 .. 10 holds all that the claim allows, and more"),
    )
    for change, se, expected, why in cases:
        got = f(change, se, 1.0, 3.0)
        if got != expected:
            raise AssertionError(
                f"verdict on {change} +- {se}, claim 1 .. 3: got {got!r}, expected "
                f"{expected!r}\nlikely cause: {why}"
            )
    print("ok: verdicts")


def check_front(f):
    """f(cost, loss) -> indices of the points that no other beats, by cost.

    A point is beaten if another costs no more and loses less, or costs less and loses
    no more.
    """
    cost = np.array([7, 3, 5, 9, 5, 3, 8, 12])
    loss = np.array([2.0, 6.0, 4.0, 2.5, 3.0, 8.0, 2.0, 0.5])
    expected = [1, 4, 0, 7]
    mistakes = {
        "8 costs more than 7 and loses the same: it is beaten": [1, 4, 0, 6, 7],
        "of two that cost the same the worse one is beaten": [1, 2, 4, 0, 7],
        "the order is by cost": sorted(expected),
        "return indices, not costs": [3, 5, 7, 12],
        "every point is here: leave out those that another beats": np.argsort(
            cost, kind="stable"
        ),
    }
    got = f(cost.copy(), loss.copy())
    if got is not None and np.size(got) == 0:
        raise AssertionError(
            f"the front: got no points, expected {expected}\n"
            "likely cause: a point is not beaten by itself"
        )
    compare("the front", got, expected, mistakes)


# --- a cache for somebody else's model ------------------------------------------------
def check_cache_layer(Layer):
    """Layer(policy).update(k, v) -> (keys, values) of all tokens, as stored."""
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 2, 50, 8)).astype(np.float32)
    k[..., 5] += 9
    policy = Policy(Scheme(2, "channel", 16, "asymmetric"), Scheme(3, "token", 8))
    layer, cache = Layer(policy), KVCache(policy)
    for start, stop in (0, 21), (21, 22), (22, 50):
        before = [cache.keys(), cache.values()] if start else [k[:, :0], v[:, :0]]
        new = [x[:, start:stop] for x in (k, v)]
        cache.append(*new)
        got = unpack_answer("update", layer.update(*new), ("keys", "values"))
        stored = cache.keys(), cache.values()
        for i, name in enumerate(("keys", "values")):
            mistakes = {
                "these are the new tokens: the model wants all of them": stored[i][
                    :, start:
                ],
                "this is what came in: the model must see what is stored": (k, v)[i][
                    :, :stop
                ],
                "store the new tokens first, then read": before[i],
                "keys and values are swapped": stored[1 - i],
            }
            what = f"{name} after tokens {start}..{stop - 1}"
            compare(what, got[i], stored[i], mistakes)


def check_mask_sizes(f):
    """f(T, t, W) -> (columns, first): what t new tokens after T others see, window W.

    A query sees the newest W tokens, itself included.
    """
    for T, t, W in (100, 1, 32), (100, 7, 32), (10, 3, 32), (31, 1, 32), (32, 1, 32):
        first = max(T - W + 1, 0)
        expected = T + t - first, first
        answer = unpack_answer("mask sizes", f(T, t, W), ("columns", "first"))
        mistakes = {
            "the first new query sees W - 1 tokens before itself, not W": (
                T + t - max(T - W, 0),
                max(T - W, 0),
            ),
            "the first new query decides, not the last": (
                T + t - max(T + t - W, 0),
                max(T + t - W, 0),
            ),
            "there is no token before token 0": (T + t - (T - W + 1), T - W + 1),
            "the new tokens are columns too": (T - first, first),
            "first columns, then where they begin": expected[::-1],
        }
        compare(f"mask sizes, T={T}, t={t}, W={W}", answer, expected, mistakes)


def check_times_quantized(f):
    """f(prompt, total, F) -> tokens quantized: all of them, after every F new ones.

    The prompt is quantized when it has come.
    """
    for prompt, total, F in (36, 100, 8), (256, 1023, 128), (40, 45, 8):
        flushes = range(prompt, total + 1, F)
        expected = sum(flushes)
        mistakes = {
            "at every flush the whole history is quantized again": flushes[-1],
            "the prompt is quantized as well, once before the first flush": expected
            - prompt,
            "the last flush is the one at or before `total`": sum(
                range(prompt, total + F, F)
            ),
            "this counts flushes; add up their tokens": len(flushes),
        }
        what = f"tokens quantized, prompt {prompt}, total {total}, F={F}"
        compare(what, f(prompt, total, F), expected, mistakes)
