"""Policies as text and as files."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import KVCache
from kvq.layers import LayerPolicies, load_layers, parse_layers, parse_policy
from kvq.scheme import PRESETS, Policy, Scheme

KIVI, INT8 = PRESETS["kivi-2"], PRESETS["int8-token"]


# --- text -----------------------------------------------------------------------------
def test_a_policy_is_read():
    p = parse_policy("int4-token-g64/kivi-2:residual=32:sinks=4")
    assert (p.key, p.value) == (PRESETS["int4-token-g64"].key, KIVI.value)
    assert (p.residual, p.sinks) == (32, 4)
    assert p.name == "int4-token-g64/kivi-2:residual=32:sinks=4"
    assert parse_policy("kivi-2") == parse_layers("kivi-2") == KIVI


def test_layers_are_set_apart():
    p = parse_layers("kivi-2,layers=0-1:int8-token,layers=4:fp16/kivi-4:residual=7")
    last = parse_policy("fp16/kivi-4:residual=7")
    assert p.all(6) == [INT8, INT8, KIVI, KIVI, last, KIVI]
    assert p[4].residual == 7
    assert p[99] is p.default
    with pytest.raises(ValueError, match=r"layer 4 in 'kivi-2,.*'; valid: 0\.\.3"):
        p.all(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown policy 'int5'"),
        ("fp16/int5", "unknown policy 'int5'"),
        ("kivi-2:window=3", "'window=3' in 'kivi-2:window=3'; valid: residual=128"),
        ("kivi-2:sinks=-1", "'sinks=-1'"),
        ("kivi-2:sinks=\u0663", "'sinks="),
        ("kivi-2:sinks=9999999999", "'sinks=9999999999'"),
        ("kivi-2:residual", "'residual'"),
        ("", "unknown policy ''"),
        ("kivi-2,fp16", "'fp16' in 'kivi-2,fp16'; valid: layers=0-1:int8-token"),
        ("kivi-2,layers=0", "'layers=0' in"),
        ("kivi-2,layers=:fp16", "layers ''; valid: 29 or 0-1"),
        ("kivi-2,layers=-1:fp16", "layers '-1'; valid: 29 or 0-1"),
        ("kivi-2,layers=1-:fp16", "layers '1-'; valid: 29 or 0-1"),
        ("kivi-2,layers=0-1-2:fp16", "layers '0-1-2'"),
        ("kivi-2,layers=3-2:fp16", "layers '3-2'; valid: A-B, A <= B < 10,000"),
        ("kivi-2,layers=0-99999999:fp16", "layers '0-99999999'; valid: A-B"),
        ("kivi-2,layers=0-3:fp16,layers=2:kivi-4", "layer 2 is set twice"),
        ("kivi-2,layers=0:int5", "unknown policy 'int5'"),
        ("kivi-2,", "'' in 'kivi-2,'"),
    ],
)
def test_text_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse_layers(text)


# --- files ----------------------------------------------------------------------------
def write(folder, content, name="p.json"):
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read(tmp_path):
    schemes = {"key": {"bits": 5, "group": None}, "value": {"bits": 3, "group": 16}}
    content = {
        "about": "an example",
        "default": "kivi-2:residual=32",
        "layers": {"0-1": "int8-token", "3": schemes | {"residual": 9, "sinks": 2}},
    }
    path = write(tmp_path, content)
    p = parse_layers(str(path))
    mine = Policy(Scheme(5, group=None), Scheme(3, group=16), 9, 2)
    assert p.all(4) == [INT8, INT8, parse_policy("kivi-2:residual=32"), mine]
    assert KVCache(p[3]).policy == mine
    assert p.name.startswith("p.json@")
    other = load_layers(write(tmp_path, content | {"about": "another"}))
    assert other.name.startswith("p.json@")
    assert other.name != p.name  # a changed file is another policy
    assert other.layers == p.layers


def test_what_is_saved_is_read_again(tmp_path):
    mine = Policy(Scheme(3, "channel", 24, "asymmetric"), Scheme(6, "token", None), 5)
    named = parse_policy("kivi-4/kivi-2:residual=32")
    misleading = replace(KIVI, residual=1)  # its name says something else
    p = LayerPolicies(named, {0: mine, 7: misleading, 2: INT8})
    p.save(tmp_path / "s.json", about="a test")
    again = load_layers(tmp_path / "s.json")
    assert again.default == named
    unnamed = {n: replace(q, name="") for n, q in p.layers.items()}
    assert {n: replace(q, name="") for n, q in again.layers.items()} == unnamed
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["about"] == "a test"
    assert content["default"] == "kivi-4/kivi-2:residual=32"
    assert content["layers"]["2"] == "int8-token"


SCHEMES = {"key": {"bits": 4}, "value": {"bits": 4}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("[1]", r"the file: \[1\]; valid: an object"),
        ("{}", "the file: 'default' is missing"),
        ('{"default": "kivi-2", "default": "fp16"}', "'default' is there twice"),
        ("[" * 100_000, "recursion"),
        ({"default": "int5"}, "unknown policy 'int5'"),
        ({"default": 4}, "default: 4; valid: an object"),
        ({"default": "fp16", "bits": 4}, "unknown 'bits'; valid: about, default, lay"),
        ({"default": "fp16", "about": 3}, "about=3; valid: text"),
        ({"default": "fp16", "layers": ["kivi-2"]}, "layers: .* valid: an object"),
        ({"default": "fp16", "layers": {"a": "kivi-2"}}, "layers 'a'; valid: 29 or"),
        ({"default": "fp16", "layers": {"0": None}}, "layers 0: None"),
        (
            {"default": "fp16", "layers": {"0-2": "kivi-2", "1": "kivi-4"}},
            "layer 1 is set twice",
        ),
        ({"default": {"key": {"bits": 4}}}, "default: 'value' is missing"),
        ({"default": SCHEMES | {"residual": -1}}, "default: residual=-1; valid: an"),
        ({"default": SCHEMES | {"key": {"bits": 9}}}, "default, key: bits=9 with"),
        ({"default": SCHEMES | {"key": {"bit": 9}}}, "default, key: unknown 'bit'"),
        ({"default": SCHEMES | {"key": {"per": ["token"]}}}, r"per=\['token'\]; valid"),
        ({"default": SCHEMES | {"key": "kivi-2"}}, "default, key: 'kivi-2'; valid: an"),
        ({"default": SCHEMES | {"value": None}}, "default, value: None; valid: an"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=rf"^p\.json: .*{message}") as caught:
        load_layers(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_and_files_that_are_too_large(tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(b'{"default": "\xff"}')
    with pytest.raises(ValueError, match=r"p\.json: not UTF-8 text"):
        load_layers(path)
    path.write_text('{"default": "fp16"}' + " " * 2**20)
    with pytest.raises(ValueError, match=r"p\.json: larger than 1,048,576 bytes"):
        load_layers(path)
    with pytest.raises(FileNotFoundError):
        parse_layers("none.json")


NAMES = st.sampled_from(
    [
        "default",
        "layers",
        "key",
        "value",
        "bits",
        "residual",
        "per",
        "0",
        "1-3",
        "about",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMES, x, max_size=3),
    max_leaves=8,
)
SCHEME = st.fixed_dictionaries({"bits": st.integers(2, 8) | JSON})
POLICY = st.fixed_dictionaries({"key": SCHEME, "value": SCHEME}) | st.just("kivi-2")


@settings(max_examples=50, deadline=None)
@given(default=POLICY | JSON, layers=st.dictionaries(NAMES, POLICY) | JSON)
def test_any_json_is_read_or_is_one_line(tmp_path_factory, default, layers):
    folder = tmp_path_factory.getbasetemp()
    path = write(folder, {"default": default, "layers": layers})
    try:
        found = load_layers(path)
    except ValueError as error:
        line = str(error)
        assert line.startswith("p.json: ")
        assert "\n" not in line
    else:
        KVCache(found[2])
