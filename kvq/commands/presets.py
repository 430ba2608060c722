"""`kvq presets`: the named policies."""

from dataclasses import asdict

from kvq.commands.common import print_json, table


def add(commands):
    p = commands.add_parser("presets", help="the named policies")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=presets)


def presets(options):
    """Print every preset: keys, values, window, and bits per number."""
    from kvq.memory import ModelShape, cache_bytes
    from kvq.scheme import PRESETS

    T, D = 8192, 128
    shape = ModelShape(layers=1, kv_heads=1, head_dim=D)
    bits = {
        name: 8 * cache_bytes(name, shape, tokens=T) / shape.numbers(T)
        for name in PRESETS
    }
    if options.json:
        print_json(
            [asdict(p) | {"bits_per_element": bits[n]} for n, p in PRESETS.items()]
        )
        return
    rows = [
        [name, f"{bits[name]:.3f}", str(p.residual), describe(p.key), _values(p)]
        for name, p in PRESETS.items()
    ]
    titles = ["policy", "bits/number", "window", "keys", "values"]
    print(*table([titles, *rows], left=(0, 3, 4)), sep="\n")
    print(f"bits/number: T={T:,}, D={D}, with scales, zeros and window (in float16)")


def _values(policy):
    return "the same" if policy.value == policy.key else describe(policy.value)


def describe(scheme):
    """A scheme in a few words."""
    if scheme.full_precision:
        return scheme.levels
    group = f"G={scheme.group}" if scheme.group else "one group"
    words = [f"{scheme.bits} bits per {scheme.per}", group, scheme.levels]
    if scheme.scale_dtype != "float16":
        words.append(scheme.scale_dtype)
    return ", ".join(words + ([scheme.transform] if scheme.transform else []))
