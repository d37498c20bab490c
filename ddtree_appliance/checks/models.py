"""Checks of target and drafter: complete, made for each other, and of a size that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddtree_appliance.checkpoint import Checkpoint, read_checkpoint, read_optional_json, with_local_models
from ddtree_appliance.checks import NOT_CHECKED, Facts, Host
from ddtree_appliance.config import Config
from ddtree_appliance.ddtree.pair import block_size_of, pair_problems
from ddtree_appliance.errors import HostError, UsageError
from ddtree_appliance.gpus import Gpu
from ddtree_appliance.memory import context_limit, gib, plan_memory, text_config

# docs/benchmarks/h200.md, up to 32 requests: trees of more than 15 nodes were no faster than DFLASH with as many tokens
# in a step, and faster with fewer; those of 15, with the root as wide as the chain, were faster in every case.
_LOSING_TOKENS, _SAFE_BUDGET = 512, 15
_BALANCE = 0.9  # SGLang refuses ranks whose free memory differs by more than a tenth


@contextmanager
def _sound_configs() -> Iterator[None]:
    # A config.json can hold anything, and its readers take fields for what they should be.
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise HostError(
            f"a config.json does not describe a model as the engine knows them: {type(error).__name__}: {error}",
            "is it the config.json of a text model, unchanged?",
        ) from error


def models(facts: Facts, host: Host) -> str:
    """Both folders are there and complete."""
    facts.config = with_local_models(facts.config)
    engine = facts.config.engine
    errors: list[HostError] = []
    for name, location in (("target", engine.model), ("drafter", engine.drafter)):
        try:
            setattr(facts, name, read_checkpoint(Path(location), needs_tokenizer=name == "target"))
        except HostError as error:
            errors.append(error)
    if errors:
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        raise HostError("; ".join(error.message for error in errors), "\n  ".join(hints))
    return f"{engine.model} and {engine.drafter} are complete"


def pair(facts: Facts, host: Host) -> str:
    """The drafter was made for the target."""
    if facts.target is None or facts.drafter is None:
        return NOT_CHECKED
    with _sound_configs():
        problems = pair_problems(text_config(facts.target.config), facts.drafter.config)
        given, own = facts.config.ddtree.block_size, block_size_of(facts.drafter.config)
    if given is not None and own is not None and given != own:
        problems.append(f"ddtree.block_size is {given}, the drafter's {own}")
    if problems:
        raise UsageError(
            "target and drafter do not belong together: " + "; ".join(problems), "use the target's own drafter"
        )
    return f"the drafter fits the target, block size {own}"


def shape(facts: Facts, host: Host) -> str:
    """What the configuration asks of the models is what they are made for."""
    if facts.target is None or facts.drafter is None:
        return NOT_CHECKED
    engine, tp_size = facts.config.engine, facts.config.tp_size
    problems, hints = [], []
    with _sound_configs():
        wanted = engine.context_length or context_limit(facts.target.config)
        for name, checkpoint in (("target", facts.target), ("drafter", facts.drafter)):
            model = text_config(checkpoint.config)
            heads, kv_heads = int(model["num_attention_heads"]), int(model.get("num_key_value_heads") or 0)
            if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
                problems.append(f"the {name}'s {heads} heads ({kv_heads or heads} for KV) do not divide over {tp_size}")
                hints.append("name another number of gpus")
            # SGLang gives the drafter the target's context and refuses one beyond the drafter's own, after the weights.
            if wanted > (limit := context_limit(checkpoint.config)):
                given = "engine.context_length" if engine.context_length else "the target's context"
                problems.append(f"{given} {wanted} is beyond the {name}'s {limit}")
                hints.append(f"engine.context_length: {limit} or less")
    if engine.kv_dtype == "auto" and _asks_for_fp8_kv(facts.target):
        problems.append("the target's checkpoint asks for an FP8 KV pool, which is unproved with trees")
        hints.append("engine.kv_dtype: bfloat16")
    if problems:
        raise UsageError("; ".join(problems), "; ".join(dict.fromkeys(hints)))
    return f"context {wanted} of {context_limit(facts.target.config)}; {_full_verify(facts.config)}"


def _full_verify(config: Config) -> str:
    """How much a verify step of the fullest batch computes, and whether that is known to be too much."""
    requests, width = config.engine.max_running_requests, config.ddtree.budget + 1
    said = f"a full batch of {requests} verifies {requests * width} tokens"
    if config.engine.device == "cpu" or config.ddtree.budget <= _SAFE_BUDGET or requests * width < _LOSING_TOKENS:
        return said
    advice = f"ddtree.budget: {_SAFE_BUDGET} was faster up to 32 requests"
    return f"{said}, with which one H200 was no faster than with DFLASH; {advice}"


def _asks_for_fp8_kv(target: Checkpoint) -> bool:
    # As SGLang's ModelOpt configurations, in either of their two places.
    sections = (
        target.config.get("quantization_config"),
        read_optional_json(target.path / "hf_quant_config.json").get("quantization"),
    )
    for section in sections:
        if not isinstance(section, dict) or not section.get("quant_algo"):
            continue
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, dict):
            if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
                return True
        elif str(section.get("kv_cache_quant_algo")).upper() == "FP8":
            return True
    return False


def memory(facts: Facts, host: Host) -> str:
    """Weights, KV pool and the buffers of a step fit."""
    if facts.target is None or facts.drafter is None:
        return NOT_CHECKED
    config, gpus = facts.config, facts.gpus or []
    if config.engine.device == "cpu":
        free = total = _available_memory(host)
    elif not gpus:
        return NOT_CHECKED
    else:
        free, total = min(gpu.free_bytes for gpu in gpus), min(gpu.total_bytes for gpu in gpus)
        if free < _BALANCE * max(gpu.free_bytes for gpu in gpus):
            raise HostError("free memory differs between the GPUs: " + _users(gpus), "stop what uses them")
    with _sound_configs():
        plan = facts.plan = plan_memory(config, facts.target, facts.drafter, free)
        fits_when_empty = not plan_memory(config, facts.target, facts.drafter, total).problems
    if plan.problems and fits_when_empty:
        message = "; ".join(plan.problems) + f"; on idle GPUs it would fit: {_users(gpus)}"
        raise HostError(message, "stop what uses them")
    if plan.problems:
        raise UsageError(
            "; ".join(plan.problems),
            "lower engine.context_length, max_running_requests or ddtree.budget, change memory_fraction, or set "
            "guarantee_context: false",
        )
    return f"{plan.needed_tokens} of {plan.pool_tokens} KV tokens needed, {gib(plan.rest_bytes)} left for a step"


def _users(gpus: list[Gpu]) -> str:
    parts = []
    for gpu in gpus:
        by = ", ".join(f"pid {pid} {gib(used)}" for pid, used in gpu.users)
        parts.append(f"GPU {gpu.name_in_cdi} {gib(gpu.free_bytes)} free" + (f" ({by})" if by else ""))
    return "; ".join(parts)


def _available_memory(host: Host) -> int:
    """What this process and its children may still take: of the machine, and of its container."""
    available = None
    for line in host.meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if available is None:
        raise HostError(f"{host.meminfo} has no MemAvailable", "is /proc mounted?")
    limit, used = (_number_in(host.cgroup / name) for name in ("memory.max", "memory.current"))
    return available if limit is None else min(available, max(limit - (used or 0), 0))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit (outside a container, or cgroup v1), or "max"
        return None
