"""Hypothesis strategies: extra arguments and whole configurations that nothing is wrong with, as YAML."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ddtree_appliance.ddtree.start_rules import READ_FLAGS, SPECULATIVE_PREFIXES, START_RULES
from ddtree_appliance.engine_args import OWNED, REFUSED_FLAGS
from ddtree_appliance.flag_table import Flag, flag_table

PAIR = "engine:\n  model: /srv/models/target\n  drafter: /srv/models/drafter\n"

_OWNED = {owned.flag for owned in OWNED}
_JUDGED = {rule.field for rule in START_RULES}
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**18), 10**18)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(-1e9, 1e9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
sizes = st.integers(0, 10**12) | st.sampled_from(["64k", "25.6k", "1M", "2G", "64Ki", "1Mi", "0", "-1", " 7 ", "1_0"])


def fuzz(examples: int) -> settings:
    """The same examples in every run: a failure here is a failure everywhere."""
    checks = list(HealthCheck)
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks, derandomize=True, database=None)


def free_flags() -> list[Flag]:
    """Flags that an operator may add: not the appliance's own, refused, deprecated, judged or unread."""
    return [
        flag
        for name, flag in flag_table().items()
        if name == flag.flag
        and not {flag.flag} & (_OWNED | set(REFUSED_FLAGS))
        and flag.kind != "deprecated"
        and flag.dest not in _JUDGED
        and (not flag.dest.startswith(SPECULATIVE_PREFIXES) or flag.dest in READ_FLAGS)
    ]


def values_of(flag: Flag) -> st.SearchStrategy[Any]:
    """Values that `flag` takes."""
    if flag.kind == "switch":
        return st.just(True)
    if flag.kind == "pair":
        return st.booleans()
    scalars: dict[str, st.SearchStrategy[Any]] = {
        "str": words.filter(lambda word: word not in ("--", "None")),  # SGLang reads a None here and there
        "int": st.integers(-(10**18), 10**18),
        "float": numbers,
        "size": sizes,
        "json": json_values.map(lambda value: json.dumps(value) if isinstance(value, str) else value),
    }
    one = st.sampled_from(flag.choices) if flag.choices else scalars[flag.type]
    if flag.kind == "list":
        return st.lists(one.filter(lambda value: not str(value).startswith("-")), min_size=1, max_size=3)
    return one


@st.composite
def sound_extra_args(draw: st.DrawFn) -> dict[str, Any]:
    """Extra arguments that nothing is wrong with, some under an alias."""
    flags = draw(st.lists(st.sampled_from(free_flags()), max_size=8, unique_by=lambda flag: flag.dest))
    return {draw(st.sampled_from((flag.flag, *flag.aliases))): draw(values_of(flag)) for flag in flags}


def as_yaml(value: Any) -> str:
    """`value` in one line of ASCII. YAML has JSON's escapes, but does not join two halves of a character."""
    return re.sub("[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))


def with_extra_args(extra_args: dict[str, Any], head: str = PAIR) -> bytes:
    """A configuration with `extra_args`."""
    return f"{head}  extra_args: {as_yaml(extra_args)}\n".encode()


@st.composite
def sound_configs(draw: st.DrawFn) -> bytes:
    """Configurations that nothing is wrong with, for either device."""
    on_cpu = draw(st.booleans())
    names = st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters=":"), min_size=1, max_size=12)
    parts = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
    quantization = draw(
        st.none() if on_cpu else st.none() | st.sampled_from(flag_table()["quantization"].choices or ())
    )
    engine = {
        "device": "cpu" if on_cpu else "cuda",
        "model": f"/srv/models/{draw(parts)}",
        "drafter": f"/srv/models/d/{draw(parts)}",
        "served_model_name": draw(st.none() | names.filter(lambda name: name != "--")),
        "trust_remote_code": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["auto", "bfloat16", "float16", *(["float32"] if on_cpu else [])])),
        "context_length": draw(st.integers(64, 1 << 21)),
        "max_running_requests": draw(st.integers(1, 4096)),
        "memory_fraction": draw(st.floats(1e-300, 1, exclude_max=True)),
        "kv_tokens": draw(st.integers(64, 10**15)),
        "page_size": 2 ** draw(st.integers(0, 8)),
        "kv_dtype": draw(st.sampled_from(["auto", "bfloat16"])),
        "quantization": quantization,
        "drafter_quantization": "unquant" if quantization else None,
    }
    ddtree = {"budget": draw(st.integers(1, 128)), "topk": draw(st.integers(2, 64)), "block_size": 16}
    extra_args = draw(sound_extra_args())
    for name in ("sleep-on-idle", "disable-decode-cuda-graph", "disable-prefill-cuda-graph") if on_cpu else ():
        extra_args.pop(name, None)
    tree = {"engine": {**engine, "extra_args": extra_args}, "ddtree": ddtree, "gpus": [] if on_cpu else ["0"]}
    return as_yaml(tree).encode()
