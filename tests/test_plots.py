import importlib.util
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from kvq import study
from kvq.samples import Sample, synthetic_kv
from kvq.tables import read_table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kvq import plots

FIGURES = Path(__file__).parents[1] / "figures"
SCRIPTS = sorted(FIGURES.glob("plot_*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables():
    """Every study on a small sample: all dimensions differ, ragged groups."""
    sample = synthetic_kv(2, 37, 8, q_heads=6, queries=5, outlier_channels=1)
    small = {"bits": {"bits": (2, 4)}, "key-vs-value": {"bits": (2, 4)}}
    return {
        name: run(sample, **small.get(name, {})) for name, run in study.STUDIES.items()
    }


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


# --- each study has a picture ---------------------------------------------------------
@pytest.mark.parametrize("name", study.STUDIES)
def test_every_study_has_a_picture(tables, name):
    fig = plots.figure(name, tables[name], "the finding", "the sample")
    assert fig.get_suptitle() == "the finding"
    assert fig.get_facecolor() == (1, 1, 1, 1)
    for ax in fig.axes:
        assert ax.get_xlabel()
        assert ax.lines
    fig.draw_without_rendering()


def test_an_unknown_study_has_none():
    with pytest.raises(ValueError, match="study='group'; valid: group-size"):
        plots.figure("group", [])


def test_pictures_are_the_same_bytes_each_time(tables, tmp_path):
    stems = [tmp_path / "a", tmp_path / "b"]
    for stem in stems:
        plots.save(plots.figure("axis", tables["axis"], "x"), stem)
    for suffix in (".svg", ".png"):
        first, second = (stem.with_suffix(suffix).read_bytes() for stem in stems)
        assert first == second
    assert b"<dc:date>" not in stems[0].with_suffix(".svg").read_bytes()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.png", "a.svg", "b.png", "b.svg"]


def test_lines_carry_the_measured_numbers(tables):
    _, ax = plt.subplots()
    plots.plot_key_vs_value(ax, tables["key-vs-value"], "nmse")
    drawn = {line.get_label(): line.get_ydata() for line in ax.lines}
    rows = plots.pick(tables["key-vs-value"], tensor="V", per="channel")
    assert np.array_equal(drawn["values per channel"], plots.column(rows, "nmse"))
    assert len(drawn) == 4


def test_outliers_and_maps_draw_every_head_and_token(tables):
    sample = synthetic_kv(2, 37, 8, q_heads=6, queries=5, outlier_channels=1)
    _, (left, right) = plt.subplots(1, 2)
    plots.plot_outliers(left, study.channels(sample))
    assert len(left.lines) == 4
    image = plots.plot_channel_map(right, study.channel_map(sample, block=10), "V")
    assert image.get_array().shape == (4, 8)


def test_softmax_points_lie_under_the_drawn_bound():
    sample = synthetic_kv(2, 37, 8, q_heads=6, queries=5)
    table = study.softmax_bounds(sample, bits=(2, 3), group=8, every=1)
    _, ax = plt.subplots()
    plots.plot_softmax_bounds(ax, table, "kl")
    *points, bound = ax.lines
    for line in points:
        limit = np.interp(line.get_xdata(), bound.get_xdata(), bound.get_ydata())
        assert np.all(line.get_ydata() <= limit)


@pytest.mark.parametrize("study_name", ["group-size", "rotation"])
def test_tables_without_errors_or_queries_can_be_drawn(study_name, tmp_path):
    zeros = np.zeros((1, 6, 4), np.float32)
    table = study.STUDIES[study_name](Sample(zeros, zeros, None, "zeros"))
    plots.save(plots.figure(study_name, table), tmp_path / "zeros")


def test_one_colour_has_one_meaning():
    meant = {name: c for name, c in plots.COLORS.items() if name != "predicted"}
    assert len(set(meant.values())) == len(meant)
    assert plots.COLORS["predicted"] == plots.COLORS["Gaussian"]


def test_studies_need_no_matplotlib_to_be_imported():
    code = "import sys, kvq.study; print({'matplotlib', 'joblib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


# --- the recorded figures -------------------------------------------------------------
@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def script(request):
    return load(request.param)


def recorded(name):
    return read_table(FIGURES / "data" / f"{name}.csv")[0]


def test_each_figure_is_recorded_and_states_its_finding(script):
    assert Path(script.__file__).stem == f"plot_{script.NAME}"
    assert len(script.__doc__.splitlines()[0]) <= 88
    assert 40 < len(script.finding(recorded(script.NAME))) < 120
    for suffix in (".svg", ".png"):
        assert (FIGURES / f"{script.NAME}{suffix}").exists()


def test_no_text_of_a_figure_is_cut_off_or_lies_on_another(
    script, tmp_path, monkeypatch
):
    figures = []
    monkeypatch.setattr(plots, "save", lambda fig, stem: figures.append(fig))
    script.draw(recorded(script.NAME), tmp_path / "x")
    [fig] = figures
    fig.draw_without_rendering()
    page = fig.bbox
    boxes = [t.get_window_extent() for t in visible_texts(fig)]
    for box in boxes:
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
        assert page.y0 <= box.y0
        assert box.y1 <= page.y1
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def visible_texts(fig):
    """Every text that is drawn and not empty, tick labels within the axes only."""
    from matplotlib.text import Text

    ticks, inside = set(), set()
    for ax in fig.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                labels = {tick.label1, tick.label2}
                ticks |= labels
                if low <= tick.get_loc() <= high:
                    inside |= labels
    return [
        t
        for t in fig.findobj(Text)
        if t.get_visible() and t.get_text().strip() and (t not in ticks or t in inside)
    ]


def test_recorded_keys_per_channel_beat_per_token():
    rows = recorded("group_size")
    for token in plots.pick(rows, tensor="K", per="token"):
        setting = {"bits": token["bits"], "group": token["group"]}
        [channel] = plots.pick(rows, tensor="K", per="channel", **setting)
        assert channel["nmse"] < token["nmse"] / 4


def test_recorded_values_have_outliers_in_layer_0_alone():
    rows = recorded("outliers")
    for layer in (0, 7, 15, 29):
        keys, values = (
            {
                column: max(
                    study.outlier_ratios(
                        plots.pick(rows, layer=layer, tensor=tensor), column
                    )
                )
                for column in ("absmax", "median")
            }
            for tensor in ("K", "V")
        )
        for column in ("absmax", "median"):
            assert (values[column] > keys[column]) is (layer == 0)


def test_recorded_front_has_no_small_groups_below_8_bits():
    assert load(FIGURES / "plot_pareto.py").smallest_group(recorded("pareto")) == 32


def test_recorded_scales_predict_better_than_gaussian_numbers():
    rows = recorded("group_size_all")
    for name, worst in (("predicted_scales", 0.05), ("predicted_gaussian", 1)):
        off = max(abs(r[name] / r["nmse"] - 1) for r in rows)
        assert (off < worst) is (name == "predicted_scales")


def test_recorded_queries_obey_the_softmax_bounds():
    for r in recorded("softmax_bounds"):
        assert r["tv"] <= r["tv_bound"]
        assert r["kl"] <= r["kl_bound"]


def test_recorded_window_helps_layer_0_and_a_sink_layer_15():
    script = load(FIGURES / "plot_residual.py")
    rows = recorded("residual")
    assert script.saved(rows, 0, residual=128, sinks=0) > 0.4
    assert script.saved(rows, 15, residual=128, sinks=0) < 0.2
    assert script.saved(rows, 15, residual=0, sinks=1) > 0.25
    for layer in (0, 15):
        for sinks in (0, 1):
            line = plots.pick(rows, layer=layer, sinks=sinks)
            [more_bits] = plots.pick(line, bits=4, residual=0)
            [window] = plots.pick(line, bits=2, residual=256)
            assert more_bits["output_error"] < window["output_error"]
            assert more_bits["nbytes"] < window["nbytes"]


def test_recorded_rotation_never_beats_per_channel_keys():
    rows = plots.pick(recorded("rotation"), bits=4)
    [channel] = plots.pick(rows, per="channel", transform="none", smooth=0)
    for r in plots.pick(rows, per="token"):
        assert r["nmse"] > channel["nmse"]
        assert r["output_error"] > channel["output_error"]


def test_recorded_page_gives_each_lane_its_fragments():
    codes = [r for r in recorded("page") if r["lane"] is not None]
    assert len(codes) == 16 * 64
    for r in codes:
        assert r["lane"] == 4 * (r["token"] % 8) + r["channel"] % 8 // 2
        assert r["bit"] // 32 == r["channel"] // 16
        assert r["byte"] == 512 + 16 * r["lane"] + r["bit"] // 8


def test_recorded_iq4_nl_leads_the_levels_with_one_float16_scale():
    rows = [r for r in recorded("codebook") if r["bits_per_element"] == 4.5]
    for tensor in ("K", "V", "Gaussian"):
        for per in ("token", "channel"):
            group = plots.pick(rows, tensor=tensor, per=per)
            best = max(group, key=lambda r: r["sqnr_db"])
            assert best["codebook"] == "iq4_nl"
