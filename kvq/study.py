"""Sweeps as tables: one question, one function, one list of flat rows.

    study(sample, jobs=1, progress=False, **what_to_sweep) -> list of dicts

`STUDIES` names them. A sweep is a list of independent points; joblib runs them in
this process, on all cores, or on a cluster, and the rows are the same each time.
`kvq.tables` keeps a table as a CSV file with a header.

Columns that several tables share:

    tensor               K, V, or Gaussian (independent normal numbers)
    bits_per_element     stored bits per number, counted from `nbytes`
    nmse, sqnr_db        error of the stored numbers: sum (x_hat - x)^2 / sum x^2
    predicted_gaussian   NMSE that theory expects of independent Gaussian numbers
    predicted_scales     NMSE that the stored scales explain, s^2 / 12
    output_error         ||o_hat - o|| / ||o|| of the attention output, causal
"""

import math

import numpy as np

from kvq import bounds, metrics, transforms
from kvq.attention import attention, attention_weights, scores, visible
from kvq.cache import KVCache
from kvq.dtypes import cast
from kvq.quantizer import reduce_groups, spread_groups
from kvq.samples import before_rope
from kvq.scheme import Policy, Scheme
from kvq.tensor import quantize


# --- running a sweep ------------------------------------------------------------------
def run(point, arguments, jobs=1, progress=False):
    """The rows of point(*a) for every a in `arguments`, in that order.

    point : a module-level function that returns one row or a list of rows.
    jobs : processes; -1 means one per core. With jobs=1 an enclosing
        `joblib.parallel_config` decides, so that a Dask or Ray cluster can take it.
    progress : draw a bar on stderr.
    Raises ValueError for an impossible number of jobs.
    """
    if type(jobs) is not int or (jobs < 1 and jobs != -1):
        raise ValueError(f"jobs={jobs!r}; valid: an integer >= 1, or -1 for all cores")
    from joblib import delayed

    calls = [delayed(point)(*a) for a in arguments]
    results = _parallel(jobs)(calls)
    if progress:
        from tqdm import tqdm

        results = tqdm(results, total=len(calls), unit="point", leave=False)
    rows = []
    for result in results:
        rows += result if isinstance(result, list) else [result]
    return rows


def _parallel(jobs):
    from joblib import Parallel

    n_jobs = None if jobs == 1 else jobs  # None: what parallel_config says, else 1
    try:
        return Parallel(n_jobs=n_jobs, return_as="generator")
    except ValueError:  # some backends, Ray's among them, return everything at once
        return Parallel(n_jobs=n_jobs)


# --- what the points share ------------------------------------------------------------
def _tensors(sample, gaussian=False):
    """[(name, tensor)]: K, V and, on request, Gaussian numbers of K's shape."""
    tensors = [("K", sample.k), ("V", sample.v)]
    if gaussian:
        rng = np.random.default_rng(0)
        normal = rng.standard_normal(sample.k.shape, dtype=np.float32)
        tensors.append(("Gaussian", normal))
    return tensors


def _needs_queries(sample, study):
    if sample.q is None:
        raise ValueError(
            f"the study {study!r} needs queries, and {sample.name!r} has none; "
            "valid: a sample with q (H_q, T_q, D)"
        )


def _numbers_per_scale(x, scheme):
    """How many numbers share one scale (the last group may be smaller)."""
    group = scheme.group_shape(*x.shape)
    return math.prod(min(n, g) for n, g in zip(x.shape, group, strict=True))


def _error(x, qt):
    """The columns that say what is stored and how far it is from x."""
    x_hat = qt.dequantize()
    return {
        "bits_per_element": float(qt.bits_per_element),
        "nmse": metrics.nmse(x, x_hat),
        "sqnr_db": metrics.sqnr_db(x, x_hat),
    }


def _relative(mse, x):
    """An MSE over mean x^2, or 0 where x is all zeros."""
    power = metrics.mse(np.zeros_like(x), x)
    return float(mse / power) if power else 0.0


def predict_gaussian(x, scheme):
    """NMSE if x were independent normal numbers of its own variance. A model."""
    mse = bounds.group_mse(scheme.bits, _numbers_per_scale(x, scheme), scheme.levels)
    return _relative(mse * np.var(x, dtype=np.float64), x)


def predict_from_scales(x, qt):
    """NMSE = mean s^2 / 12 * (n - m) / n over mean x^2, s the stored scales. A model.

    m of a group's n numbers are its extremes, which are stored exactly: two for
    asymmetric levels, one for symmetric ones.
    """
    group = qt.scheme.group_shape(*x.shape)
    s = qt.scale.astype(np.float64)
    s = spread_groups(s, group, range(x.shape[-2]), range(x.shape[-1]))
    n = _numbers_per_scale(x, qt.scheme)
    m = min(2 if qt.scheme.has_zero else 1, n)
    mse = np.mean(np.broadcast_to(bounds.granular_mse(s), x.shape))
    return _relative(mse * (n - m) / n, x)


def _doublings(low, high):
    """low, 2 low, 4 low, ... and high itself, none beyond it."""
    sizes = [low * 2**i for i in range(64) if low * 2**i < high]
    return [*sizes, high]


# --- group size -----------------------------------------------------------------------
def group_size(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=(2, 3, 4, 8),
    per=("token", "channel"),
    groups=None,
    levels="asymmetric",
):
    """How does the error grow with the group, and what do small groups cost?

    groups : sizes to try; None is 4, 8, 16, ... up to the whole extent (D channels
        per token, T tokens per channel).
    levels : "symmetric" or "asymmetric".
    Columns: tensor, per, bits, levels, group, bits_per_element, nmse, sqnr_db,
    predicted_gaussian, predicted_scales.
    """
    points = []
    for name, x in _tensors(sample):
        for axis in per:
            extent = x.shape[-1] if axis == "token" else x.shape[-2]
            sizes = {min(G, extent) for G in groups or _doublings(4, extent)}
            points += [
                (name, x, Scheme(b, axis, G, levels))
                for G in sorted(sizes)
                for b in bits
            ]
    return run(_group_point, points, jobs, progress)


def _group_point(name, x, scheme):
    qt = quantize(x, scheme)
    return {
        "tensor": name,
        "per": scheme.per,
        "bits": scheme.bits,
        "levels": scheme.levels,
        "group": scheme.group,
        **_error(x, qt),
        "predicted_gaussian": predict_gaussian(x, scheme),
        "predicted_scales": predict_from_scales(x, qt),
    }


def pareto_front(rows):
    """The rows that no other row beats: as few stored bits with as little error.

    Judged by bits_per_element and nmse; in the order of their bits.
    """
    front = []
    for row in sorted(rows, key=lambda r: (r["bits_per_element"], r["nmse"])):
        if not front or row["nmse"] < front[-1]["nmse"]:
            front.append(row)
    return front


# --- bits -----------------------------------------------------------------------------
def bits(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=range(1, 9),
    levels=("symmetric", "asymmetric", "lloyd-max"),
    per="token",
    group=64,
):
    """What does a bit buy, and how far is it from what theory allows?

    levels : of "symmetric" (which has no 1-bit row), "asymmetric", "lloyd-max".
    Columns: tensor (K, V, Gaussian), levels, bits, bits_per_element, nmse, sqnr_db;
    and of Gaussian numbers, the NMSE to expect: predicted_gaussian (with these
    levels), lloyd_max (the best 2^b levels), rate_distortion (any code at all).
    """
    points = [
        (name, x, Scheme(b, per, group, kind))
        for name, x in _tensors(sample, gaussian=True)
        for kind in levels
        for b in bits
        if not (kind == "symmetric" and b == 1)
    ]
    return run(_bits_point, points, jobs, progress)


def _bits_point(name, x, scheme):
    best = bounds.lloyd_max_mse(scheme.bits)
    lloyd_max = scheme.levels == "lloyd-max"
    return {
        "tensor": name,
        "levels": scheme.levels,
        "bits": scheme.bits,
        **_error(x, quantize(x, scheme)),
        "predicted_gaussian": best if lloyd_max else predict_gaussian(x, scheme),
        "lloyd_max": best,
        "rate_distortion": bounds.rate_distortion(scheme.bits),
    }


# --- axis -----------------------------------------------------------------------------
def axis(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=(2, 4, 8),
    group=64,
    levels="asymmetric",
    rope_base=None,
):
    """Which numbers should share a scale?

    Per token and per channel use `group`, so that both store as many scales; per head
    and per tensor have one scale for all tokens, as a calibrated scale would be.
    rope_base : the keys' RoPE base; adds the tensor "K before RoPE" (tokens 0..T-1).
    Columns: tensor, per, bits, numbers_per_scale, bits_per_element, nmse, sqnr_db.
    """
    tensors = _tensors(sample)
    if rope_base is not None:
        tensors.append(("K before RoPE", before_rope(sample.k, rope_base)))
    points = [
        (name, x, Scheme(b, per, G, levels))
        for name, x in tensors
        for per, G in [
            ("token", group),
            ("channel", group),
            ("head", None),
            ("tensor", None),
        ]
        for b in bits
    ]
    return run(_axis_point, points, jobs, progress)


def _axis_point(name, x, scheme):
    return {
        "tensor": name,
        "per": scheme.per,
        "bits": scheme.bits,
        "numbers_per_scale": _numbers_per_scale(x, scheme),
        **_error(x, quantize(x, scheme)),
    }


# --- keys versus values ---------------------------------------------------------------
def key_vs_value(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=(2, 3, 4, 5, 6, 8),
    per=("token", "channel"),
    group=32,
    levels="asymmetric",
):
    """At equal bits, do keys or values hurt the attention output more?

    One of the two is quantized at a time.
    Columns: tensor (the one quantized), per, bits, bits_per_element, nmse, sqnr_db;
    logit_max, logit_rms (how far logits move), logit_rms_predicted (from the stored
    scales); tv, tv_bound, kl, kl_bound (means over the queries; the bounds follow
    from each query's own logit spread), tv_max; output_error.
    Raises ValueError for a sample without queries.
    """
    _needs_queries(sample, "key-vs-value")
    points = [
        (sample, name, Scheme(b, axis, group, levels))
        for name in ("K", "V")
        for axis in per
        for b in bits
    ]
    return run(_key_vs_value_point, points, jobs, progress)


def _key_vs_value_point(sample, name, scheme):
    x = sample.k if name == "K" else sample.v
    qt = quantize(x, scheme)
    x_hat = qt.dequantize()
    k_hat, v_hat = (x_hat, sample.v) if name == "K" else (sample.k, x_hat)
    logits = _logit_errors(sample, k_hat)
    return {
        "tensor": name,
        "per": scheme.per,
        "bits": scheme.bits,
        **_error(x, qt),
        "logit_max": float(np.max(np.abs(logits["delta"]))),
        "logit_rms": float(np.sqrt(np.mean(logits["delta"] ** 2))),
        "logit_rms_predicted": _predict_logit_rms(sample, qt) if name == "K" else 0.0,
        **{
            key: float(np.mean(logits[key]))
            for key in ("tv", "tv_bound", "kl", "kl_bound")
        },
        "tv_max": float(np.max(logits["tv"])),
        "output_error": _output_error(sample, k_hat, v_hat),
    }


def _causal(sample):
    """Which token each query sees: bool (H_q, T_q, T), the queries being the newest."""
    return visible((*sample.q.shape[:-1], sample.k.shape[-2]), causal=True)


def _logit_errors(sample, k_hat):
    """What a change of the keys does to logits and weights, per query (H_q, T_q).

    "delta" holds the logit changes of all visible tokens, in one dimension.
    """
    seen = _causal(sample)
    delta = metrics.logit_change(sample.q, sample.k, k_hat)
    top = np.max(delta, axis=-1, where=seen, initial=-np.inf)
    omega = top - np.min(delta, axis=-1, where=seen, initial=np.inf)
    p = attention_weights(sample.q, sample.k, causal=True)
    p_hat = attention_weights(sample.q, k_hat, causal=True)
    return {
        "delta": delta[seen],
        "omega": omega,
        "tv": metrics.total_variation(p, p_hat),
        "tv_bound": bounds.softmax_tv_bound(omega),
        "kl": metrics.attention_kl(p, p_hat),
        "kl_bound": bounds.softmax_kl_bound(omega),
    }


def _predict_logit_rms(sample, qt):
    """sqrt(mean sum_c q_c^2 s_c^2 / (12 D)): `bounds.score_error_variance` / D."""
    group = qt.scheme.group_shape(*qt.shape)
    T, D = qt.shape[-2:]
    s = spread_groups(qt.scale.astype(np.float64), group, range(T), range(D))
    s2 = np.broadcast_to(np.square(s), qt.shape)
    variance = scores(np.square(sample.q, dtype=np.float64), s2, scale=1 / (12 * D))
    return float(np.sqrt(np.mean(variance[_causal(sample)])))


def _output_error(sample, k_hat, v_hat):
    o = attention(sample.q, sample.k, sample.v, causal=True)
    o_hat = attention(sample.q, k_hat, v_hat, causal=True)
    return metrics.output_error(o, o_hat)


def softmax_bounds(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=(2, 3, 4, 8),
    per="token",
    group=32,
    levels="asymmetric",
    every=4,
):
    """How near do real queries come to the softmax bounds?

    Keys alone are quantized; of the newest queries, each `every`-th is reported.
    Columns: bits, head, query, omega (spread of the logit changes), tv, tv_bound,
    kl, kl_bound. Raises ValueError for a sample without queries.
    """
    _needs_queries(sample, "softmax-bounds")
    points = [(sample, Scheme(b, per, group, levels), every) for b in bits]
    return run(_softmax_point, points, jobs, progress)


def _softmax_point(sample, scheme, every):
    logits = _logit_errors(sample, quantize(sample.k, scheme).dequantize())
    heads, queries, _ = sample.q.shape
    return [
        {
            "bits": scheme.bits,
            "head": h,
            "query": i,
            **{
                key: float(logits[key][h, i])
                for key in ("omega", "tv", "tv_bound", "kl", "kl_bound")
            },
        }
        for h in range(heads)
        for i in range(0, queries, every)
    ]


# --- the residual window --------------------------------------------------------------
def residual(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=(2, 4),
    sinks=(0, 1),
    windows=None,
    group=32,
    every=4,
):
    """What does a full-precision window of the newest R tokens buy, at what price?

    Keys per channel, values per token, asymmetric, as KIVI stores them. The cache
    grows token by token, and each `every`-th of the sample's queries attends when its
    token is the newest.
    sinks : numbers of first tokens to keep in full precision as well.
    windows : values of R; None is 0, 16, 32, 64, ... up to all T tokens.
    Columns: bits, sinks, residual, quantized (tokens, at the end), nbytes,
    bits_per_element, output_error. Raises ValueError for a sample without queries.
    """
    _needs_queries(sample, "residual")
    T = sample.k.shape[-2]
    if windows is None:
        windows = [0, *_doublings(16, T)]
    points = []
    for b in bits:
        key = Scheme(b, "channel", group, "asymmetric")
        value = Scheme(b, "token", group, "asymmetric")
        for S in sinks:
            points += [(sample, Policy(key, value, R, S), every) for R in windows]
    return run(_residual_point, points, jobs, progress)


def _residual_point(sample, policy, every):
    cache, outputs = _stream(sample, policy, every)
    exact = attention(sample.q, sample.k, sample.v, causal=True)[:, ::every]
    return {
        "bits": policy.key.bits,
        "sinks": policy.sinks,
        "residual": policy.residual,
        "quantized": policy.split(len(cache))[1],
        "nbytes": cache.nbytes,
        "bits_per_element": 8 * cache.nbytes / (sample.k.size + sample.v.size),
        "output_error": metrics.output_error(exact, outputs),
    }


def _stream(sample, policy, every):
    """A cache fed token by token, and what the queries got that attended on the way.

    Returns (cache, outputs (H_q, ceil(T_q / every), D_v)).
    """
    k, v, q = sample.k, sample.v, sample.q
    first = k.shape[-2] - q.shape[-2]
    cache = KVCache(policy)
    cache.append(k[:, :first], v[:, :first])
    outputs = []
    for i in range(q.shape[-2]):
        newest = slice(first + i, first + i + 1)
        cache.append(k[:, newest], v[:, newest])
        if i % every == 0:
            outputs.append(cache.attend(q[:, i : i + 1]))
    return cache, np.concatenate(outputs, axis=-2)


# --- rotation and smoothing -----------------------------------------------------------
def rotation(
    sample,
    jobs=1,
    progress=False,
    *,
    bits=(2, 4),
    per=("token", "channel"),
    group=64,
    levels="asymmetric",
):
    """Do a rotation or a shift of the keys tame their outlier channels?

    Keys are stored as they are, rotated (Hadamard, with and without random signs),
    and each of these after their mean over tokens was taken away (smoothing).
    Columns: per, bits, transform ("none", ...), smooth (0 or 1), bits_per_element
    (the mean is stored in float16 and counts), max_over_rms (of a group of what is
    quantized, averaged), nmse, output_error (nan for a sample without queries).
    Raises ValueError for a head dimension that is not a power of two.
    """
    points = [
        (sample, Scheme(b, axis, group, levels, transform=name), smooth)
        for axis in per
        for name in (None, "hadamard", "signed-hadamard")
        for smooth in (0, 1)
        for b in bits
    ]
    return run(_rotation_point, points, jobs, progress)


def _rotation_point(sample, scheme, smooth):
    k = sample.k.astype(np.float32)
    shifted, mean = transforms.smooth_keys(k)
    mean = cast(mean, "float16")
    x = (shifted if smooth else k).astype(np.float32)
    qt = quantize(x, scheme)
    # The mean drops out of the softmax; it is added back for the error of K itself.
    k_hat = qt.dequantize() + (mean.astype(np.float32) if smooth else 0)
    error = math.nan if sample.q is None else _output_error(sample, k_hat, sample.v)
    stored = qt.nbytes + (mean.nbytes if smooth else 0)
    return {
        "per": scheme.per,
        "bits": scheme.bits,
        "transform": scheme.transform or "none",
        "smooth": smooth,
        "bits_per_element": 8 * stored / k.size,
        "max_over_rms": max_over_rms(transforms.apply(scheme.transform, x), scheme),
        "nmse": metrics.nmse(k, k_hat),
        "output_error": error,
    }


def max_over_rms(x, scheme):
    """max|x| / rms of a group, averaged over the groups of x that are not all zero.

    1 for a group of equal magnitudes, sqrt(n) for one number among n zeros.
    """
    group = scheme.group_shape(*x.shape)
    x = np.abs(np.asarray(x, np.float64))
    top = reduce_groups(np.maximum, x, group)
    count = reduce_groups(np.add, np.ones_like(x), group)
    rms = np.sqrt(reduce_groups(np.add, x**2, group) / count)
    return float(np.mean(top[rms > 0] / rms[rms > 0])) if np.any(rms) else 1.0


# --- codebooks ------------------------------------------------------------------------
CODEBOOK_SCHEMES = {
    "symmetric": ("symmetric", "float16"),
    "asymmetric": ("asymmetric", "float16"),
    "nf4": ("nf4", "float16"),
    "iq4_nl": ("iq4_nl", "float16"),
    "lloyd-max": ("lloyd-max", "float16"),
    "e2m1": ("e2m1", "float16"),
    "mxfp4": ("e2m1", "e8m0"),
}


def codebook(sample, jobs=1, progress=False, *, per=("token", "channel"), group=32):
    """Which 16 levels suit keys, values and Gaussian numbers?

    Columns: tensor (K, V, Gaussian), per, codebook (a key of CODEBOOK_SCHEMES; mxfp4
    is e2m1 with power-of-two scales), bits_per_element, nmse, sqnr_db.
    """
    points = [
        (name, x, label, Scheme(4, axis, group, levels, scale_dtype))
        for name, x in _tensors(sample, gaussian=True)
        for axis in per
        for label, (levels, scale_dtype) in CODEBOOK_SCHEMES.items()
    ]
    return run(_codebook_point, points, jobs, progress)


def _codebook_point(name, x, label, scheme):
    return {
        "tensor": name,
        "per": scheme.per,
        "codebook": label,
        **_error(x, quantize(x, scheme)),
    }


STUDIES = {
    "group-size": group_size,
    "bits": bits,
    "axis": axis,
    "key-vs-value": key_vs_value,
    "residual": residual,
    "rotation": rotation,
    "codebook": codebook,
}


# --- channels -------------------------------------------------------------------------
def channels(sample):
    """How large is each channel, and is it so at every token?

    Columns: tensor, head, channel, absmax and median of |x| over the tokens.
    """
    return [
        {
            "tensor": name,
            "head": h,
            "channel": c,
            "absmax": float(np.max(a[h, :, c])),
            "median": float(np.median(a[h, :, c])),
        }
        for name, x in _tensors(sample)
        for a in [np.abs(x.astype(np.float64))]
        for h in range(a.shape[0])
        for c in range(a.shape[2])
    ]


def outlier_ratios(rows, column="absmax"):
    """Largest over typical (median) channel of each head in rows of `channels`."""
    heads = {}
    for r in rows:
        head = (r.get("layer"), r["tensor"], r["head"])
        heads.setdefault(head, []).append(r[column])
    return [float(np.max(sizes) / np.median(sizes)) for sizes in heads.values()]


def channel_map(sample, head=0, block=16):
    """Mean |x| of each channel over blocks of tokens, one head: a picture's pixels.

    Columns: tensor, token (the block's first), channel, mean (six digits).
    """
    return [
        {
            "tensor": name,
            "token": t,
            "channel": c,
            "mean": float(f"{np.mean(np.abs(x[head, t : t + block, c])):.6g}"),
        }
        for name, x in _tensors(sample)
        for t in range(0, x.shape[1], block)
        for c in range(x.shape[2])
    ]
