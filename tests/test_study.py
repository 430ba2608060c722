import math
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import quantize, study, tables
from kvq.attention import attention_weights
from kvq.samples import ROPE_BASE, Sample, real_kv, synthetic_kv
from kvq.scheme import Scheme


@pytest.fixture(scope="module")
def tiny():
    """Every dimension differs; an outlier channel; a constant channel."""
    sample = synthetic_kv(2, 37, 8, q_heads=6, queries=5, outlier_channels=1)
    sample.v[1, :, 3] = 0.25
    return sample


@pytest.fixture(scope="module")
def no_queries(tiny):
    return Sample(tiny.k, tiny.v, None, "file.npz")


@pytest.fixture(scope="module")
def real_groups():
    return study.group_size(real_kv(15))


def only(rows, **wanted):
    [row] = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    return row


def some(rows, **wanted):
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


# --- group size -----------------------------------------------------------------------
def test_group_size_covers_what_the_figure_shows(real_groups):
    assert len(real_groups) == 2 * 4 * (5 + 8)
    assert {r["bits"] for r in real_groups} == {2, 3, 4, 8}
    assert {r["group"] for r in some(real_groups, per="token")} == {4, 8, 16, 32, 64}
    assert max(r["group"] for r in some(real_groups, per="channel")) == 512


def test_real_keys_per_channel_beat_per_token_at_equal_bits(real_groups):
    for token in some(real_groups, tensor="K", per="token"):
        setting = {"bits": token["bits"], "group": token["group"]}
        channel = only(real_groups, tensor="K", per="channel", **setting)
        assert channel["bits_per_element"] == token["bits_per_element"]
        assert channel["nmse"] < token["nmse"] / 4


def test_error_grows_and_bytes_shrink_with_the_group(real_groups):
    lines = {(r["tensor"], r["per"], r["bits"]) for r in real_groups}
    for tensor, per, bits in lines:
        line = some(real_groups, tensor=tensor, per=per, bits=bits)
        assert np.all(np.diff([r["nmse"] for r in line]) > 0)
        assert np.all(np.diff([r["bits_per_element"] for r in line]) < 0)


def test_stored_scales_predict_real_errors(real_groups):
    for r in real_groups:
        assert r["predicted_scales"] == pytest.approx(r["nmse"], rel=0.05)


def test_gaussian_prediction_holds_for_gaussian_numbers():
    sample = synthetic_kv(3, 256, 64, outlier_channels=0)
    for levels, from_bits in (("asymmetric", 2), ("symmetric", 3)):
        for r in study.group_size(sample, levels=levels):
            if r["bits"] >= from_bits and r["group"] >= 8:
                assert r["predicted_gaussian"] == pytest.approx(r["nmse"], rel=0.12)


def test_bits_per_element_counts_codes_scales_and_zeros(tiny):
    rows = study.group_size(tiny, bits=(3,), groups=(5,))
    per_token, per_channel = some(rows, tensor="V")
    # 2 heads, 37 tokens, 8 channels: 3-byte rows, 16-bit scale and zero per group
    assert per_token["bits_per_element"] == 3 + 32 * 2 / 8
    assert per_channel["bits_per_element"] == 3 + 32 * 8 / 37


def test_groups_beyond_the_extent_are_the_extent(tiny):
    rows = study.group_size(tiny, bits=(4,), per=("token",), groups=(4, 8, 100))
    assert [r["group"] for r in some(rows, tensor="K")] == [4, 8]


def test_predictions_of_a_zero_tensor_are_zero():
    zeros = np.zeros((1, 3, 4), np.float32)
    for r in study.group_size(Sample(zeros, zeros, None, "zeros"), groups=(2,)):
        assert r["nmse"] == r["predicted_gaussian"] == r["predicted_scales"] == 0
        assert r["sqnr_db"] == math.inf


def test_wrong_levels_are_named_before_anything_runs(tiny):
    with pytest.raises(ValueError, match="levels='nf4'"):
        study.group_size(tiny, levels="nf4", bits=(4,))


def test_pareto_front_keeps_what_nothing_beats():
    rows = [
        {"bits_per_element": b, "nmse": e}
        for b, e in [(3, 0.2), (2, 0.5), (4, 0.3), (3, 0.1), (5, 0.1), (6, 0.05)]
    ]
    assert study.pareto_front(rows) == [rows[1], rows[3], rows[5]]


# --- bits -----------------------------------------------------------------------------
def test_lloyd_max_meets_its_theory_on_gaussian_numbers():
    rows = study.bits(real_kv(15), levels=("lloyd-max",), bits=(1, 2, 3, 4))
    for r in some(rows, tensor="Gaussian"):
        assert r["nmse"] == pytest.approx(r["lloyd_max"], rel=0.08)
        assert r["nmse"] > 4.0 ** -r["bits_per_element"]


def test_gaussian_levels_fail_on_real_keys_per_token():
    rows = some(study.bits(real_kv(15), bits=(4, 8)), tensor="K")
    gain = {
        levels: only(rows, levels=levels, bits=8)["sqnr_db"]
        - only(rows, levels=levels, bits=4)["sqnr_db"]
        for levels in ("asymmetric", "lloyd-max")
    }
    assert gain["asymmetric"] == pytest.approx(4 * 6.02, abs=1)
    assert gain["lloyd-max"] < 16


def test_one_bit_has_no_symmetric_row(tiny):
    rows = study.bits(tiny, bits=(1, 2))
    assert {r["levels"] for r in some(rows, bits=1)} == {"asymmetric", "lloyd-max"}


# --- axis -----------------------------------------------------------------------------
def test_keys_want_channels_and_more_so_before_rope():
    rows = study.axis(real_kv(15), bits=(4,), rope_base=ROPE_BASE)
    error = {(r["tensor"], r["per"]): r["nmse"] for r in rows}
    assert error["K before RoPE", "channel"] < error["K", "channel"]
    assert error["K", "channel"] < error["K", "token"] / 5
    assert error["V", "token"] < 2 * error["V", "channel"]
    for tensor in ("K", "V", "K before RoPE"):
        worst = max(error[tensor, per] for per in ("token", "channel", "head"))
        assert worst < error[tensor, "tensor"]


def test_axis_without_a_rope_base_has_no_keys_before_rope(tiny):
    rows = study.axis(tiny, bits=(4,), group=8)
    assert {r["tensor"] for r in rows} == {"K", "V"}
    sizes = [r["numbers_per_scale"] for r in some(rows, tensor="K")]
    assert sizes == [8, 8, 37 * 8, 2 * 37 * 8]


# --- keys versus values ---------------------------------------------------------------
def test_key_errors_stay_within_the_softmax_bounds():
    for r in study.key_vs_value(real_kv(7), bits=(2, 4)):
        assert r["tv"] <= r["tv_bound"]
        assert r["kl"] <= r["kl_bound"]
        if r["tensor"] == "V":
            assert r["logit_max"] == r["tv"] == r["kl"] == 0 < r["output_error"]
        else:
            assert r["logit_rms_predicted"] == pytest.approx(r["logit_rms"], rel=0.1)


@pytest.mark.parametrize(("layer", "exception"), [(7, False), (15, False), (0, True)])
def test_values_stored_better_can_give_a_worse_output(layer, exception):
    rows = some(study.key_vs_value(real_kv(layer), bits=(4,)), tensor="V")
    token, channel = (only(rows, per=per) for per in ("token", "channel"))
    assert channel["nmse"] < token["nmse"]
    assert (channel["output_error"] < token["output_error"]) is exception


def test_token_zero_alone_makes_values_per_channel_worse_in_layer_15():
    sample = real_kv(15)
    weights = attention_weights(sample.q, sample.k, causal=True)
    assert weights[..., 0].mean() > 1 / 3
    error = {}
    for per in ("token", "channel"):
        v_hat = quantize(sample.v, Scheme(4, per, 32, "asymmetric")).dequantize()
        v_hat[:, 0] = sample.v[:, 0]
        error[per] = study._output_error(sample, sample.k, v_hat)
    assert error["channel"] < 0.8 * error["token"]


def test_softmax_rows_obey_the_bounds_one_by_one():
    rows = study.softmax_bounds(real_kv(29), bits=(2,), every=7)
    assert len(rows) == 9 * 10
    for r in rows:
        assert 0 < r["tv"] <= r["tv_bound"] < 1
        assert 0 < r["kl"] <= r["kl_bound"]


def test_logit_changes_of_hidden_tokens_do_not_count(tiny):
    k_hat = tiny.k.copy()
    k_hat[:, -1] += 100  # only the newest query sees the newest token
    logits = study._logit_errors(tiny, k_hat)
    assert np.all(logits["omega"][:, :-1] == 0)
    assert np.all(logits["tv"][:, -1] > 0)


@pytest.mark.parametrize("name", ["key-vs-value", "residual"])
def test_studies_that_need_queries_say_so(no_queries, name):
    with pytest.raises(ValueError, match=rf"'{name}' needs queries, and 'file.npz'"):
        study.STUDIES[name](no_queries)


# --- the residual window --------------------------------------------------------------
def test_window_bytes_are_those_of_its_parts(tiny):
    H, T, D = tiny.k.shape
    for r in study.residual(tiny, bits=(2,), windows=(0, 3, 11), group=4):
        n = r["quantized"]
        packed = sum(
            Scheme(2, per, 4, "asymmetric").nbytes(H, n, D)
            for per in ("channel", "token")
        )
        assert r["nbytes"] == packed + 2 * H * (T - n) * D * 4  # float32 window
        assert T - r["sinks"] - r["residual"] - n in range(4)


def test_a_window_of_all_tokens_quantizes_nothing(tiny):
    rows = study.residual(tiny, bits=(2,), windows=(0, 37), sinks=(0,), group=4)
    assert [r["quantized"] for r in rows] == [36, 0]
    assert rows[1]["output_error"] < 1e-12 < rows[0]["output_error"]
    assert rows[1]["bits_per_element"] == 32


def test_queries_may_begin_at_the_first_token(tiny):
    q = np.resize(tiny.q, (4, 37, 8))
    sample = Sample(tiny.k, tiny.v, q, "all queries")
    rows = study.residual(sample, bits=(8,), windows=(0,), sinks=(0,), every=1)
    assert 0 < rows[0]["output_error"] < 0.02


def test_token_zero_matters_more_than_the_window_in_layer_15():
    rows = study.residual(real_kv(15), bits=(2,), windows=(0, 128), every=8)
    bare = only(rows, sinks=0, residual=0)["output_error"]
    assert only(rows, sinks=1, residual=0)["output_error"] < 0.8 * bare
    assert only(rows, sinks=0, residual=128)["output_error"] > 0.7 * bare


# --- rotation -------------------------------------------------------------------------
def test_rotation_and_smoothing_tame_keys_per_token():
    rows = some(study.rotation(real_kv(15), bits=(4,)), per="token")
    plain = only(rows, transform="none", smooth=0)
    rotated = only(rows, transform="hadamard", smooth=0)
    smoothed = only(rows, transform="none", smooth=1)
    assert rotated["max_over_rms"] < 0.6 * plain["max_over_rms"]
    assert rotated["nmse"] < 0.6 * plain["nmse"]
    assert smoothed["nmse"] < 0.3 * plain["nmse"]
    assert smoothed["bits_per_element"] == plain["bits_per_element"] + 16 / 512


def test_rotation_without_queries_has_no_output_error(no_queries):
    rows = study.rotation(no_queries, bits=(4,), group=8)
    assert all(math.isnan(r["output_error"]) for r in rows)
    assert all(r["nmse"] < 0.05 for r in rows)


def test_rotation_needs_a_power_of_two():
    with pytest.raises(ValueError, match="power of two, not 12"):
        study.rotation(synthetic_kv(1, 16, 12, q_heads=1, queries=2))


def test_max_over_rms_of_a_spike_is_the_root_of_the_group():
    x = np.zeros((1, 2, 16), np.float32)
    x[0, 0, 5] = -3
    assert study.max_over_rms(x, Scheme(4, "token", None)) == 4
    assert study.max_over_rms(np.ones_like(x), Scheme(4, "token", None)) == 1


# --- codebooks ------------------------------------------------------------------------
def test_codebooks_store_what_they_say():
    rows = study.codebook(real_kv(15))
    bits = {r["codebook"]: r["bits_per_element"] for r in rows}
    assert (bits["asymmetric"], bits["nf4"], bits["mxfp4"]) == (5, 4.5, 4.25)
    keys = some(rows, tensor="K", per="token")
    assert min(keys, key=lambda r: r["sqnr_db"])["codebook"] == "lloyd-max"
    for tensor in ("K", "V", "Gaussian"):
        for per in ("token", "channel"):
            best = max(some(rows, tensor=tensor, per=per), key=lambda r: r["sqnr_db"])
            assert best["codebook"] == "asymmetric"


# --- channels -------------------------------------------------------------------------
def test_real_keys_have_outlier_channels_and_values_only_in_layer_0():
    largest = {}
    for layer in (0, 15, 29):
        rows = study.channels(real_kv(layer))
        assert len(rows) == 2 * 3 * 64
        for name in ("K", "V"):
            ratios = study.outlier_ratios(some(rows, tensor=name))
            largest[layer, name] = max(ratios)
    assert min(largest[layer, "K"] for layer in (0, 15, 29)) > 3
    assert max(largest[layer, "V"] for layer in (15, 29)) < 2.5
    assert largest[0, "V"] > 7


def test_outlier_ratio_is_largest_over_median():
    rows = [
        {"tensor": "K", "head": h, "absmax": a}
        for h, sizes in enumerate([(1, 2, 8), (3, 3, 3)])
        for a in sizes
    ]
    assert study.outlier_ratios(rows) == [4, 1]


def test_channel_map_is_the_mean_of_each_block(tiny):
    rows = study.channel_map(tiny, head=1, block=10)
    assert len(rows) == 2 * 4 * 8
    last = only(rows, tensor="K", token=30, channel=6)
    assert last["mean"] == pytest.approx(np.abs(tiny.k[1, 30:, 6]).mean(), rel=1e-5)


# --- running --------------------------------------------------------------------------
def small_sweep(sample, **options):
    return study.group_size(sample, bits=(2, 4), groups=(4,), **options)


def test_two_processes_give_the_same_rows(tiny):
    assert small_sweep(tiny, jobs=2) == small_sweep(tiny)


def where(_):
    return {"thread": threading.current_thread().name}


def test_an_outer_parallel_config_decides():
    import joblib

    with joblib.parallel_config(backend="threading", n_jobs=2):
        rows = study.run(where, [(i,) for i in range(6)])
    assert threading.main_thread().name not in {r["thread"] for r in rows}


def test_a_backend_that_returns_everything_at_once_works(tiny, capsys):
    import joblib
    from joblib._parallel_backends import ThreadingBackend

    class AtOnce(ThreadingBackend):  # as the backends of multiprocessing and Ray do
        supports_return_generator = False

    joblib.register_parallel_backend("at-once", AtOnce)
    with joblib.parallel_config(backend="at-once", n_jobs=2):
        rows = small_sweep(tiny, progress=True)
    assert rows == small_sweep(tiny)


def test_progress_goes_to_stderr(tiny, capsys):
    assert small_sweep(tiny, progress=True) == small_sweep(tiny)
    out, err = capsys.readouterr()
    assert out == ""
    assert "8/8" in err or "point" in err


@pytest.mark.parametrize("jobs", [0, -2, 1.5, True, "2"])
def test_impossible_jobs_are_refused(tiny, jobs):
    with pytest.raises(ValueError, match=re.escape(f"jobs={jobs!r}; valid")):
        small_sweep(tiny, jobs=jobs)


def test_every_study_has_flat_rows_with_equal_columns(tiny):
    group = {"axis": 8, "bits": 8, "key-vs-value": 8, "rotation": 8, "codebook": 8}
    for name, run in study.STUDIES.items():
        rows = run(tiny, **({"group": group[name]} if name in group else {}))
        assert rows
        assert len({tuple(r) for r in rows}) == 1
        kinds = {type(value) for r in rows for value in r.values()}
        assert kinds <= {int, float, str}


# --- tables ---------------------------------------------------------------------------
CELLS = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.sampled_from(["K before RoPE", 'a "quoted, text"', "µ = 3", "# not a header"]),
)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"a": CELLS, "b_2": CELLS}), min_size=1))
def test_tables_come_back_exactly(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tables") / "t.csv"
    tables.write_table(path, rows, {"finding": "4 bits: enough", "n": 3})
    back, header = tables.read_table(path)
    assert header == {"finding": "4 bits: enough", "n": "3"}
    assert all(set(r) == {"a", "b_2"} for r in back)
    for row, same in zip(rows, back, strict=True):
        assert {k: repr(v) for k, v in row.items()} == {
            k: repr(v) for k, v in same.items()
        }


def test_numpy_scalars_are_written_as_numbers(tmp_path):
    row = {"i": np.int64(3), "x": np.float32(0.1), "y": np.float64(0.1)}
    tables.write_table(tmp_path / "t.csv", [row])
    back = tables.read_table(tmp_path / "t.csv")[0]
    assert back == [{"i": 3, "x": float(np.float32(0.1)), "y": 0.1}]


@pytest.mark.parametrize("cell", ["12", "nan", "", True, [1], "two\nlines"])
def test_what_a_table_cannot_hold_is_refused(tmp_path, cell):
    with pytest.raises(ValueError, match=r"^x="):
        tables.write_table(tmp_path / "t.csv", [{"x": cell}])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "columns"),
        ([{"": 1}], "columns"),
        ([{"# a": 1}], "columns"),
        ([{"a": 1}, {"b": 1}], "row 1 has columns"),
    ],
)
def test_rows_without_equal_columns_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        tables.write_table(tmp_path / "t.csv", rows)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "t.csv"
    tables.write_table(path, [{"a": 1}])
    with pytest.raises(ValueError, match="header"):
        tables.write_table(path, [{"a": 2}], {"two": "li\nnes"})
    assert tables.read_table(path)[0] == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# k: v\na,b\n1,2\n1,2,3\n", "line 4: 3 cells; expected 2"),
        ("# k: v\na,b\n1,2\n\n", "line 4: 0 cells"),
        ("# no colon\na\n1\n", "line 1: expected '# key: value'"),
        ("# k: v\n", "line 2: no column names"),
        ("", "line 1: no column names"),
        ("a,a\n1,2\n", "line 1: column names"),
        ('a,b\n1,"2\n', "line 2"),
    ],
)
def test_malformed_tables_name_the_line(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        tables.read_table(tmp_path / "t.csv")


def test_a_binary_file_is_not_a_table(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(ValueError, match=r"t\.csv: not UTF-8"):
        tables.read_table(tmp_path / "t.csv")


def test_provenance_names_versions_and_no_place():
    facts = tables.provenance("kvq study bits")
    assert facts["command"] == "kvq study bits"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert f"NumPy {np.__version__}" in facts["versions"]
    assert "/" not in facts["versions"] + facts.get("commit", "")
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", facts.get("commit", "0123456"))
