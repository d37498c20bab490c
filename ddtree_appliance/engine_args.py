"""From the configuration to SGLang's command line, and which flags an operator may add to it.

`OWNED` is the one list of what the appliance sets: it renders the command line, and a flag in it is refused as an extra
argument with the key to use instead. Keys never stand in a command line: they reach SGLang in a file (`key_file`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ddtree_appliance.config import Config
from ddtree_appliance.ddtree.start_rules import READ_FLAGS, SPECULATIVE_PREFIXES, START_RULES, TREE_BACKENDS
from ddtree_appliance.flag_table import Flag, flag_table, nearest
from ddtree_appliance.yaml_source import shown

ENGINE_PORT = 30000  # inside the container; server.port is where the host publishes it
SIDECAR_PORT = 30001


@dataclass(frozen=True)
class Owned:
    """A flag that `key` of the configuration sets. value: None leaves the flag out.

    only_if_set: where it is left out, an operator may add it.
    """

    flag: str
    key: str
    value: Callable[[Config], Any] = lambda config: None
    only_if_set: bool = False


def _engine(name: str) -> Callable[[Config], Any]:
    return lambda config: getattr(config.engine, name)


def attention_backend(config: Config) -> str:
    """The backend in force: the first that is proved for trees on the device, if `auto`."""
    chosen = config.engine.attention_backend
    return TREE_BACKENDS[config.engine.device][0] if chosen == "auto" else chosen


def _on_cpu(config: Config) -> bool | None:
    return True if config.engine.device == "cpu" else None


OWNED: tuple[Owned, ...] = (
    Owned("model-path", "engine.model", _engine("model")),
    Owned("speculative-draft-model-path", "engine.drafter", _engine("drafter")),
    Owned("revision", "engine.model_revision"),
    Owned("speculative-draft-model-revision", "engine.drafter_revision"),
    Owned("served-model-name", "engine.served_model_name", _engine("served_model_name")),
    Owned("trust-remote-code", "engine.trust_remote_code", lambda config: config.engine.trust_remote_code or None),
    Owned("device", "engine.device", _engine("device")),
    Owned("dtype", "engine.dtype", _engine("dtype")),
    Owned("context-length", "engine.context_length", _engine("context_length")),
    Owned("max-running-requests", "engine.max_running_requests", _engine("max_running_requests")),
    Owned("mem-fraction-static", "engine.memory_fraction", _engine("memory_fraction")),
    Owned("max-total-tokens", "engine.kv_tokens", _engine("kv_tokens")),
    Owned("attention-backend", "engine.attention_backend", attention_backend),
    Owned("prefill-attention-backend", "engine.attention_backend"),
    Owned("decode-attention-backend", "engine.attention_backend"),
    Owned("speculative-draft-attention-backend", "engine.attention_backend"),
    Owned("page-size", "engine.page_size", _engine("page_size")),
    Owned("kv-cache-dtype", "engine.kv_dtype", _engine("kv_dtype")),
    Owned("quantization", "engine.quantization", _engine("quantization")),
    Owned("speculative-draft-model-quantization", "engine.drafter_quantization", _engine("drafter_quantization")),
    Owned("speculative-algorithm", "ddtree", lambda config: "DDTREE"),
    Owned("speculative-ddtree-budget", "ddtree.budget", lambda config: config.ddtree.budget),
    Owned("speculative-ddtree-topk", "ddtree.topk", lambda config: config.ddtree.topk),
    Owned("speculative-dflash-block-size", "ddtree.block_size", lambda config: config.ddtree.block_size),
    Owned("speculative-num-draft-tokens", "ddtree.budget"),
    Owned("tp-size", "gpus", lambda config: config.tp_size),
    Owned("base-gpu-id", "gpus"),
    Owned("gpu-id-step", "gpus"),
    Owned("host", "server.host", lambda config: "0.0.0.0"),
    Owned("port", "server.port", lambda config: ENGINE_PORT),
    Owned("api-key", "server.api_key_secret"),
    Owned("admin-api-key", "server.admin_key_secret"),
    Owned("enable-metrics", "health", lambda config: True),
    # The probes ask every few seconds; their lines would bury everything else in the journal.
    Owned("uvicorn-access-log-exclude-prefixes", "health", lambda config: ["/health", "/metrics"]),
    # A rehearsal shares its few cores; graphs are a GPU's.
    Owned("sleep-on-idle", "engine.device", _on_cpu, only_if_set=True),
    Owned("disable-decode-cuda-graph", "engine.device", _on_cpu, only_if_set=True),
    Owned("disable-prefill-cuda-graph", "engine.device", _on_cpu, only_if_set=True),
)

# Flags that work in SGLang but break a promise of the appliance: the reason, and what to do instead.
REFUSED_FLAGS: dict[str, tuple[str, str]] = {
    "config": ("the appliance passes the keys to SGLang in such a file", "write the file's flags into extra_args"),
    "cuda-graph-config": (
        "its settings are flags of their own",
        "use cuda-graph-backend-decode, cuda-graph-max-bs-decode and the like",
    ),
    "skip-server-warmup": ("the service would be called ready before it has answered once", "leave it out"),
    "checkpoint-engine-wait-weights-before-ready": ("weights are read from engine.model", "leave it out"),
    "ssl-keyfile": ("TLS is terminated by a proxy in front (server.tls)", "configure the proxy"),
    "ssl-certfile": ("TLS is terminated by a proxy in front (server.tls)", "configure the proxy"),
    "ssl-ca-certs": ("TLS is terminated by a proxy in front (server.tls)", "configure the proxy"),
    "ssl-keyfile-password": ("TLS is terminated by a proxy in front (server.tls)", "configure the proxy"),
    "enable-ssl-refresh": ("TLS is terminated by a proxy in front (server.tls)", "configure the proxy"),
    "enable-http2": ("TLS and HTTP/2 are the proxy's in front (server.tls)", "configure the proxy"),
    "download-dir": ("the engine does not download: models are mounted read-only", "fetch models into paths.models"),
    "dist-init-addr": ("one engine runs on one host", "leave it out"),
    "node-rank": ("one engine runs on one host", "leave it out"),
    "nccl-port": ("the container has its own network", "leave it out"),
    "fastapi-root-path": ("probes and smoke test use the plain paths", "rewrite paths in the proxy"),
    "crash-dump-folder": (
        "a dump holds the prompts of all users, and the container's root is read-only",
        "leave it out",
    ),
    "debug-tensor-dump-output-folder": ("the container's root is read-only", "debug outside the appliance"),
    "enable-custom-logit-processor": ("it runs code that a request brings", "leave it out"),
    "forward-hooks": ("it runs code in the engine", "leave it out"),
    "custom-weight-loader": ("it runs code in the engine", "leave it out"),
    "model-impl": ("DDTREE is proved with SGLang's own models", "leave it out"),
    "load-format": ("preflight and memory arithmetic read safetensors checkpoints", "leave it out"),
    "delete-ckpt-after-loading": ("it deletes the model", "leave it out"),
    "enable-profile-cuda-graph": ("it is for profiling", "profile outside the appliance"),
    "cpu-offload-gb": ("offloaded weights are untested with drafts", "use a smaller model or more GPUs"),
    "enable-torch-compile": ("compiled graphs are untested with trees", "leave it out"),
    "sidecar": ("it starts another program beside the engine", "run it in its own container"),
    "sidecar-args": ("it starts another program beside the engine", "run it in its own container"),
}

_OWNED_BY_FLAG = {owned.flag: owned for owned in OWNED}


@dataclass(frozen=True)
class ArgumentProblem:
    """What is wrong with one flag. key: the configuration's key, dotted, without the flag of an extra argument."""

    key: str
    flag: str | None
    message: str
    hint: str


def sglang_arguments(config: Config) -> list[str]:
    """SGLang's command line for `config`, without keys. Its extra arguments must be sound (`argument_problems`)."""
    table = flag_table()
    arguments: list[str] = []
    for owned in OWNED:
        if (value := owned.value(config)) is not None:
            arguments += table[owned.flag].arguments(value)
    for name, value in config.engine.extra_args.items():
        arguments += table[name].arguments(value)
    return arguments


def argument_problems(config: Config) -> Iterator[ArgumentProblem]:
    """Everything that SGLang's parser or DDTREE would refuse, found without either."""
    table = flag_table()
    values = {flag.dest: flag.default for flag in table.values()}
    setters: dict[str, tuple[str, str | None]] = {}
    for owned in OWNED:
        if (value := owned.value(config)) is None:
            continue
        flag = table[owned.flag]
        try:
            flag.arguments(value)
        except ValueError as error:
            yield ArgumentProblem(owned.key, None, str(error), _remedy(flag, value, config))
        values[flag.dest] = value
        setters[flag.dest] = (owned.key, None)
    for name, value in config.engine.extra_args.items():
        problem = _extra_problem(name, value, table.get(name), config)
        if problem is None and (earlier := setters.get(table[name].dest)) is not None:
            problem = f"is the same flag as {earlier[1]}", "keep one of them"
        if problem is not None:
            yield ArgumentProblem("engine.extra_args", name, *problem)
            continue
        values[table[name].dest] = value
        setters[table[name].dest] = ("engine.extra_args", name)
    arguments = SimpleNamespace(**values)
    for rule in START_RULES:
        if rule.broken(arguments):
            key, extra = setters.get(rule.field, ("engine", None))
            prefix = "" if extra else f"--{rule.field.replace('_', '-')} = "
            message = f"{prefix}{_flag_shown(values[rule.field])} is refused: {rule.reason}"
            yield ArgumentProblem(key, extra, message, "change or remove it")


def key_for_flag(name: str) -> str | None:
    """The key of the configuration that sets SGLang's flag `name` (dashes or underscores); None for no such flag."""
    flag = flag_table().get(name.lstrip("-").replace("_", "-"))
    if flag is None:
        return None
    owned = _OWNED_BY_FLAG.get(flag.flag)
    if owned is None or owned.only_if_set:
        return f"engine.extra_args.{flag.flag}"
    return owned.key if _is_settable(owned) else None


def _is_settable(owned: Owned) -> bool:
    return owned.key == "gpus" or "." in owned.key


def _remedy(flag: Flag, value: Any, config: Config) -> str:
    if value is None or flag.kind == "switch":
        return "leave it out for SGLang's default"
    if flag.choices is not None:
        return f"its choices are {', '.join(map(str, flag.choices))}"
    if flag.kind == "value" and flag.type == "str" and type(value) in (int, float):
        return "put it in quotes"
    return _help(config)


def _help(config: Config) -> str:
    return f"podman run --rm {config.unit.image} launch -- --help shows SGLang's flags"


def _flag_shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.isprintable() and len(text) <= 80 else shown(text)


def _extra_problem(name: str, value: Any, flag: Flag | None, config: Config) -> tuple[str, str] | None:
    if flag is None:
        return _unknown_problem(name, value, config)
    owned = _OWNED_BY_FLAG.get(flag.flag)
    if owned is not None and not owned.only_if_set:
        return "is set by the appliance", f"use {owned.key} instead" if _is_settable(owned) else "leave it out"
    if owned is not None and owned.value(config) is not None:
        section, _, key = owned.key.partition(".")
        return f"is set by the appliance for {owned.key}: {getattr(getattr(config, section), key)}", "leave it out"
    if flag.flag in REFUSED_FLAGS:
        reason, remedy = REFUSED_FLAGS[flag.flag]
        return f"is refused: {reason}", remedy
    if flag.kind == "deprecated":
        remedy = f"use {flag.replaced_by}" if flag.replaced_by else "leave it out: it has no effect"
        return "is deprecated in SGLang 0.5.17", remedy
    if flag.dest.startswith(SPECULATIVE_PREFIXES) and flag.dest not in READ_FLAGS:
        return "belongs to another speculative algorithm: DDTREE does not read it", "leave it out"
    try:
        flag.arguments(value)
    except ValueError as error:
        return str(error), _remedy(flag, value, config)
    return None


def _unknown_problem(name: str, value: Any, config: Config) -> tuple[str, str]:
    table = flag_table()
    plain = name.lstrip("-").replace("_", "-")
    if plain in table:
        return _extra_problem(plain, value, table[plain], config) or (
            "is not how the flag is written",
            f"write {plain}",
        )
    message = "SGLang 0.5.17 has no such flag"
    pair = table.get(plain.removeprefix("no-"))
    if pair is not None and pair.kind == "pair":
        return message, f"write {pair.flag}: false"
    near = nearest(plain)
    if near is None:
        return message, _help(config)
    owned = _OWNED_BY_FLAG.get(table[near].flag)
    own_key = f" that is {owned.key}" if owned is not None and _is_settable(owned) and not owned.only_if_set else ""
    return message, f"did you mean {near}?{own_key}"
