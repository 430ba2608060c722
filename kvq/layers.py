r"""Policies as text and as files: one for all layers of a model, or layers set apart.

    POLICY = KEYS[/VALUES][:residual=R][:sinks=S]    kivi-4/kivi-2:residual=32
    LAYERS = POLICY,layers=A[-B]:POLICY,...          kivi-2,layers=0-1:int8-token

KEYS and VALUES are names of presets: the keys (and the window) are those of the first,
the values those of the second. A file says the same in JSON, and can hold schemes that
no preset has:

    {"about": "an example",
     "default": "kivi-2:residual=32",
     "layers": {"0-1": "int8-token",
                "29": {"key": {"bits": 5, "group": null}, "value": {"bits": 3},
                       "residual": 32, "sinks": 4}}}

Anything else in a file is an error of one line that names the place.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kvq.scheme import Policy, Scheme, policy

SIZE_LIMIT = 2**20  # bytes of a file
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class LayerPolicies:
    """A policy for most layers of a model, others for some.

    default : Policy. layers : {layer: Policy}, counted from 0. name : for tables.
    """

    default: Policy
    layers: dict[int, Policy] = field(default_factory=dict)
    name: str = ""

    def __getitem__(self, layer):
        """The Policy of a layer."""
        return self.layers.get(layer, self.default)

    def all(self, count):
        """The policies of a model of `count` layers, in order: a list.

        Raises ValueError where a layer is set apart that the model does not have.
        """
        beyond = [layer for layer in self.layers if not 0 <= layer < count]
        if beyond:
            raise ValueError(
                f"layer {beyond[0]} in {self.name!r}; valid: 0..{count - 1}"
            )
        return [self[layer] for layer in range(count)]

    def save(self, path, about=""):
        """Write a file that `load_layers` reads. about : where it comes from."""
        content = {"about": about} if about else {}
        content["default"] = _as_json(self.default)
        content["layers"] = {str(n): _as_json(p) for n, p in self.layers.items()}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _as_json(p):
    """The text that gives this policy, or else all of its settings."""
    try:
        if parse_policy(p.name) == p:
            return p.name
    except ValueError:
        pass
    return {key: value for key, value in asdict(p).items() if key != "name"}


# --- text -----------------------------------------------------------------------------
def parse_policy(text):
    """The Policy that KEYS[/VALUES][:residual=R][:sinks=S] names. Raises ValueError."""
    names, *settings = text.split(":")
    keys, _, values = names.partition("/")
    result = policy(keys)
    if values:
        result = replace(result, value=policy(values).value)
    for setting in settings:
        name, _, number = setting.partition("=")
        if name not in ("residual", "sinks") or not _is_number(number):
            raise ValueError(f"{setting!r} in {text!r}; valid: residual=128, sinks=4")
        result = replace(result, **{name: int(number)})
    return replace(result, name=text)


def parse_layers(text):
    """What a word on the command line names: a Policy, or LayerPolicies.

    text : POLICY, POLICY,layers=A-B:POLICY,... or the path of a .json file.
    Raises ValueError, or OSError for a file that cannot be read.
    """
    if text.endswith(".json"):
        return load_layers(text)
    default, *parts = text.split(",")
    if not parts:
        return parse_policy(text)
    pairs = []
    for part in parts:
        where, _, name = part.removeprefix("layers=").partition(":")
        if not part.startswith("layers=") or not name:
            raise ValueError(f"{part!r} in {text!r}; valid: layers=0-1:int8-token")
        pairs.append((where, parse_policy(name)))
    return LayerPolicies(parse_policy(default), _by_layer(pairs), text)


def _is_number(text):
    return text.isascii() and text.isdecimal() and len(text) < 10


def _by_layer(pairs):
    """{layer: Policy} of [("0-1", Policy), ("29", Policy)]. Raises ValueError."""
    found = {}
    for where, p in pairs:
        first, dash, last = where.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise ValueError(f"layers {where!r}; valid: 29 or 0-1")
        if not int(first) <= int(last) < MOST_LAYERS:
            raise ValueError(f"layers {where!r}; valid: A-B, A <= B < {MOST_LAYERS:,}")
        for layer in range(int(first), int(last) + 1):
            if layer in found:
                raise ValueError(f"layer {layer} is set twice")
            found[layer] = p
    return found


# --- files ----------------------------------------------------------------------------
def load_layers(path):
    """The LayerPolicies in a JSON file; its name holds a digest of what it says.

    Raises OSError, or ValueError that names the file and the place in it.
    """
    path = Path(path)
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT + 1)
    try:
        content = _parse_json(data)
        _check_object("the file", content, {"about", "default", "layers"}, {"default"})
        if not isinstance(content.get("about", ""), str):
            raise ValueError(f"about={content['about']!r}; valid: text")
        layers = content.get("layers", {})
        _check_object("layers", layers)
        pairs = [(n, _read_policy(f"layers {n}", x)) for n, x in layers.items()]
        default, by_layer = (
            _read_policy("default", content["default"]),
            _by_layer(pairs),
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    digest = hashlib.sha256(data).hexdigest()[:8]
    return LayerPolicies(default, by_layer, f"{path.name}@{digest}")


def _parse_json(data):
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"larger than {SIZE_LIMIT:,} bytes")

    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{max(keys, key=keys.count)!r} is there twice")
        return found

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _check_object(where, value, known=None, needed=()):
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r}; valid: an object, {{...}}")
    unknown = [key for key in value if known is not None and key not in known]
    if unknown:
        valid = ", ".join(sorted(known))
        raise ValueError(f"{where}: unknown {unknown[0]!r}; valid: {valid}")
    missing = sorted(set(needed) - set(value))
    if missing:
        raise ValueError(f"{where}: {missing[0]!r} is missing")


def _read_policy(where, value):
    if isinstance(value, str):
        return parse_policy(value)
    fields = {"key", "value", "residual", "sinks"}
    _check_object(where, value, fields, {"key", "value"})
    schemes = {n: _read_scheme(f"{where}, {n}", value[n]) for n in ("key", "value")}
    return _build(where, Policy, value | schemes)


def _read_scheme(where, value):
    if isinstance(value, str):
        raise ValueError(f'{where}: {value!r}; valid: an object such as {{"bits": 4}}')
    _check_object(where, value, set(Scheme.__dataclass_fields__))
    return _build(where, Scheme, value)


def _build(where, kind, settings):
    try:
        return kind(**settings)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
