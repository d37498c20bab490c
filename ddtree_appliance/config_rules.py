"""Rules that span several keys: one row, one rule, with its message and its remedy.

Rules about SGLang's own flags are rows of `engine_args` and `ddtree.start_rules`; what needs the host or the model's
files is checked by `preflight`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ddtree_appliance.config import BUNDLED, Config
from ddtree_appliance.ddtree.limits import MAX_BUDGET
from ddtree_appliance.ddtree.start_rules import TREE_BACKENDS
from ddtree_appliance.engine_args import argument_problems, attention_backend
from ddtree_appliance.yaml_source import Document, Path, Problem

# What the image and the units have in the container: nothing may be mounted in the former, nor over the latter.
_CONTAINER_FOLDERS = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt/venv", "/proc", "/root", "/sbin", "/sys", "/usr"),
    *("/run/ddtree", "/run/secrets", "/var/cache/ddtree"),
)
_CONTAINER_ROOTS = ("/", "/opt", "/run", "/tmp", "/var", "/var/cache")
# Network modes of podman, which it would take the name for, and its default network, where names do not resolve.
_PODMAN_NETWORKS = ("bridge", "container", "default", "host", "none", "ns", "pasta", "podman", "private", "slirp4netns")


@dataclass(frozen=True)
class Rule:
    """Refuse a configuration for which `broken` gives a message.

    key: where the problem is shown. reads: further keys that the rule looks at; if one is invalid, it is skipped.
    """

    key: str
    broken: Callable[[Config], str | None]
    hint: str
    reads: tuple[str, ...] = ()


def _when(condition: bool, message: str) -> str | None:
    return message if condition else None


def is_loopback(host: str) -> bool:
    """Whether `host` (an address as in server.host) is reachable from this machine only."""
    return ipaddress.ip_address(host.strip("[]")).is_loopback


def _is_the_containers(folder: str) -> bool:
    return folder in _CONTAINER_ROOTS or f"{folder}/".startswith(tuple(f"{own}/" for own in _CONTAINER_FOLDERS))


def _outside_models(config: Config, location: str) -> bool:
    if not location.startswith("/") or config.paths.models is None:
        return location.startswith("/")
    if _is_the_containers(config.paths.models):
        return False  # one problem for one mistake
    return not f"{location}/".startswith(f"{config.paths.models}/")


def _unpinned(location: str, revision: str | None) -> bool:
    return not location.startswith("/") and location not in BUNDLED and revision is None


def _uncheckable_pin(location: str, revision: str | None) -> bool:
    if revision is None:
        return False
    return location in BUNDLED or (location.startswith("/") and f"/snapshots/{revision}/" not in f"{location}/")


def _location_rules(key: str) -> tuple[Rule, ...]:
    revision_key = f"engine.{key}_revision"

    def location(config: Config) -> str:
        return str(getattr(config.engine, key))

    def revision(config: Config) -> str | None:
        pin: str | None = getattr(config.engine, f"{key}_revision")
        return pin

    return (
        Rule(
            f"engine.{key}",
            lambda config: _when(
                _outside_models(config, location(config)),
                f"{location(config)} is outside paths.models ({config.paths.models or 'null'}): the container would "
                "not see it",
            ),
            "move the model there, or set paths.models to a folder that holds both models",
            ("paths.models",),
        ),
        Rule(
            f"engine.{key}",
            lambda config: _when(
                _unpinned(location(config), revision(config)),
                f"{location(config)} is a hub name without a revision: its files could change unnoticed",
            ),
            f"set {revision_key} to the commit of the snapshot in the hub cache, or write an absolute path",
            (revision_key,),
        ),
        Rule(
            f"engine.{key}",
            lambda config: _when(
                not location(config).startswith("/")
                and location(config) not in BUNDLED
                and config.paths.models is None,
                f"{location(config)} is looked up in the hub cache below paths.models, which is null",
            ),
            "set paths.models to the folder that holds the hub cache",
            ("paths.models",),
        ),
        Rule(
            revision_key,
            lambda config: _when(
                _uncheckable_pin(location(config), revision(config)),
                f"{location(config)} is no hub snapshot of that commit: the pin could not be checked",
            ),
            "name the model by its hub name or its snapshots/REVISION folder, or remove the pin",
            (f"engine.{key}",),
        ),
    )


RULES: tuple[Rule, ...] = (
    *_location_rules("model"),
    *_location_rules("drafter"),
    Rule(
        "engine.drafter",
        lambda config: _when(config.engine.model == config.engine.drafter, "is the target itself"),
        "name the DFlash drafter that was trained for the target",
        ("engine.model",),
    ),
    Rule(
        "engine.served_model_name",
        lambda config: _when(":" in (config.engine.served_model_name or ""), "must not contain a colon"),
        "choose a name without one: SGLang takes what follows it for a LoRA adapter",
    ),
    Rule(
        "engine.dtype",
        lambda config: _when(
            config.engine.device == "cuda" and config.engine.dtype == "float32", "float32 has no kernels on cuda"
        ),
        "use auto, bfloat16 or float16; float32 is the rehearsal's",
        ("engine.device",),
    ),
    Rule(
        "engine.attention_backend",
        lambda config: _when(
            attention_backend(config) not in TREE_BACKENDS[config.engine.device],
            f"{config.engine.attention_backend} does not verify trees on {config.engine.device}; "
            f"proved there: {', '.join(TREE_BACKENDS[config.engine.device])}",
        ),
        "use auto",
        ("engine.device",),
    ),
    Rule(
        "engine.page_size",
        lambda config: _when(
            config.engine.page_size & (config.engine.page_size - 1) != 0,
            f"{config.engine.page_size} is no power of two",
        ),
        "use 1, 2, 4, ... 256",
    ),
    Rule(
        "engine.quantization",
        lambda config: _when(
            config.engine.device == "cpu" and config.engine.quantization is not None,
            "quantised kernels need a GPU",
        ),
        "remove it for a rehearsal",
        ("engine.device",),
    ),
    Rule(
        "engine.drafter_quantization",
        lambda config: _when(
            config.engine.device == "cpu" and config.engine.drafter_quantization not in (None, "unquant"),
            "quantised kernels need a GPU",
        ),
        "remove it for a rehearsal",
        ("engine.device",),
    ),
    Rule(
        "engine.drafter_quantization",
        lambda config: _when(
            config.engine.quantization is not None and config.engine.drafter_quantization is None,
            "must be set when engine.quantization is: SGLang would quantise the drafter like the target",
        ),
        "unquant is right for a bf16 drafter",
        ("engine.quantization",),
    ),
    Rule(
        "engine.kv_tokens",
        lambda config: _when(
            config.engine.device == "cpu" and config.engine.kv_tokens is None, "is required for device cpu"
        ),
        "a CPU has no memory of its own to take a share of; 16384 is enough for the bundled pair",
        ("engine.device",),
    ),
    Rule(
        "engine.context_length",
        lambda config: _when(
            config.engine.guarantee_context and config.engine.context_length is None,
            "must be set when guarantee_context is true",
        ),
        "set the longest context that is needed, or guarantee_context: false",
        ("engine.guarantee_context",),
    ),
    Rule(
        "ddtree.budget",
        lambda config: _when(
            (reachable := _reachable_nodes(config)) is not None and config.ddtree.budget > reachable,
            f"{config.ddtree.budget} nodes do not fit a tree of topk {config.ddtree.topk} and block size "
            f"{config.ddtree.block_size}: it has {reachable}",
        ),
        "lower the budget or raise topk",
        ("ddtree.topk", "ddtree.block_size"),
    ),
    Rule(
        "gpus",
        lambda config: _when(
            config.engine.device == "cuda" and not config.gpus, "is empty: device cuda needs at least one GPU"
        ),
        'list CDI names, for example ["0"]; nvidia-ctk cdi list shows them',
        ("engine.device",),
    ),
    Rule(
        "gpus",
        lambda config: _when(
            config.engine.device == "cpu" and bool(config.gpus), "must be empty for device cpu: nothing would use them"
        ),
        "write gpus: []",
        ("engine.device",),
    ),
    Rule(
        "gpus",
        lambda config: _when(len(set(config.gpus)) < len(config.gpus), "names a GPU twice"),
        "name each GPU once",
    ),
    Rule(
        "gpus",
        lambda config: _when(
            len(config.gpus) > 1 and any(name.startswith("MIG-") or ":" in name for name in config.gpus),
            "has a MIG slice among several GPUs: NCCL does not connect MIG slices",
        ),
        "use one MIG slice, or whole GPUs",
    ),
    Rule(
        "gpus",
        lambda config: _when(
            len({name.startswith(("GPU-", "MIG-")) for name in config.gpus}) > 1,
            "mixes indices and UUIDs: one card could be named twice",
        ),
        "use UUIDs throughout (nvidia-smi -L shows them)",
    ),
    Rule(
        "server.api_key_secret",
        lambda config: _when(
            config.server.api_key_secret is None
            and not is_loopback(config.server.host)
            and not config.server.allow_unauthenticated,
            f"is null while the API is published on {config.server.host}: anybody could use it",
        ),
        "name a podman secret, publish on 127.0.0.1, or set allow_unauthenticated: true",
        ("server.host", "server.allow_unauthenticated"),
    ),
    Rule(
        "server.admin_key_secret",
        lambda config: _when(
            config.server.admin_key_secret is not None
            and config.server.admin_key_secret == config.server.api_key_secret,
            "is the API key's secret: every user could manage the engine",
        ),
        "make a second podman secret",
        ("server.api_key_secret",),
    ),
    Rule(
        "health.port",
        lambda config: _when(config.health.port == config.server.port, f"{config.health.port} is server.port too"),
        "give the sidecar its own port",
        ("server.port",),
    ),
    Rule(
        "health.check_timeout_s",
        lambda config: _when(
            config.health.check_timeout_s > config.health.check_interval_s,
            f"{config.health.check_timeout_s} is longer than check_interval_s ({config.health.check_interval_s})",
        ),
        "make it at most the interval: checks would pile up",
        ("health.check_interval_s",),
    ),
    Rule(
        "health.heartbeat_limit_s",
        lambda config: _when(
            config.health.heartbeat_limit_s <= config.health.busy_after_s,
            f"{config.health.heartbeat_limit_s} is not above busy_after_s ({config.health.busy_after_s})",
        ),
        "make it longer: a scheduler in a long prefill is busy, not stuck",
        ("health.busy_after_s",),
    ),
    Rule(
        "health.progress_limit_s",
        lambda config: _when(
            config.health.progress_limit_s < config.health.heartbeat_limit_s,
            f"{config.health.progress_limit_s} is below heartbeat_limit_s ({config.health.heartbeat_limit_s})",
        ),
        "make it the longer one: a scheduler that stands still makes no progress either",
        ("health.heartbeat_limit_s",),
    ),
    Rule(
        "health.unreachable_limit_s",
        lambda config: _when(
            config.health.unreachable_limit_s < 2 * config.health.interval_s,
            f"{config.health.unreachable_limit_s} is below two intervals of {config.health.interval_s} s",
        ),
        "make it longer: one lost answer must not count as a death",
        ("health.interval_s",),
    ),
    Rule(
        "paths.models",
        lambda config: _when(
            config.paths.models is not None and _is_the_containers(config.paths.models),
            f"{config.paths.models} is the container's own: models there would hide its files or be unreadable",
        ),
        "give the models a folder of their own, such as /srv/models",
    ),
    Rule(
        "unit.network",
        lambda config: _when(
            config.unit.network in _PODMAN_NETWORKS,
            f"{config.unit.network} is podman's own: engine and sidecar need a network of theirs",
        ),
        "name a network that is not there yet, such as ddtree",
    ),
    Rule(
        "unit.restart_window_s",
        lambda config: _when(
            config.unit.restart_window_s < config.unit.restart_limit * config.unit.restart_delay_s,
            f"{config.unit.restart_window_s} is too short to see {config.unit.restart_limit} starts with pauses of "
            f"{config.unit.restart_delay_s} s: restarts would never end",
        ),
        "make it longer than restart_limit x (restart_delay_s + the time to a crash)",
        ("unit.restart_limit", "unit.restart_delay_s"),
    ),
)


def _reachable_nodes(config: Config) -> int | None:
    if config.ddtree.block_size is None:
        return None
    nodes = level = 1
    for _ in range(config.ddtree.block_size - 1):
        level *= config.ddtree.topk
        nodes += level
        if nodes > MAX_BUDGET + 1:
            break  # more than any budget
    return nodes - 1  # the root is the bonus token


def broken_rules(config: Config, document: Document, invalid: Collection[Path]) -> list[Problem]:
    """The rules that `config` breaks, at their places in `document`, but for those that read a key in `invalid`."""
    problems = []
    for rule in RULES:
        reads = [_path(key) for key in (rule.key, *rule.reads)]
        if any(_overlap(path, bad) for path in reads for bad in invalid):
            continue
        if (message := rule.broken(config)) is not None:
            problems.append(Problem(document.mark_of(reads[0]), reads[0], message, rule.hint))
    told = {problem.path for problem in problems}
    for found in argument_problems(config):
        path = _path(found.key) + (() if found.flag is None else (found.flag,))
        if path in told or any(_overlap(path, bad) for bad in invalid):
            continue
        mark = document.mark_of(path, key=found.flag is not None)
        problems.append(Problem(mark, path, found.message, found.hint))
    return problems


def _path(key: str) -> Path:
    return tuple(key.split("."))


def _overlap(path: Path, other: Path) -> bool:
    length = min(len(path), len(other))
    return bool(other) and path[:length] == other[:length]
