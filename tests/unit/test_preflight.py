"""Every check of preflight in both directions, on a host that exists only here; and all of them together."""

from __future__ import annotations

import json
import os
import socket
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_appliance import checks
from ddtree_appliance.checks import NOT_CHECKED, NOT_HERE, Facts, Host
from ddtree_appliance.checks import host as host_checks
from ddtree_appliance.config import Config
from ddtree_appliance.ddtree.start_rules import REFUSED_ENVIRONMENT
from ddtree_appliance.errors import ApplianceError, HostError, UsageError
from ddtree_appliance.gpus import CAPABILITIES, Driver, Gpu
from ddtree_appliance.memory import GIB
from ddtree_appliance.preflight import CHECKS, Finding, raise_failed, run_preflight
from tests.unit.model_folders import DRAFTER, TARGET, make_checkpoint
from tests.unit.nobody import as_nobody

BENCHMARK = Path(__file__).resolve().parents[2] / "docs/benchmarks/h200.json"
MEASURED_TREES = [row for row in json.loads(BENCHMARK.read_text())["results"] if row["algorithm"] == "DDTREE"]

KEY = "a-key-of-sixteen-or-more"
NAMES = [check.name for check in CHECKS]
DRIVER = Driver("580.159.04", (13, 0))
H200 = Gpu("0", "GPU-a", "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)


@dataclass
class Bench:
    """A host and a configuration on which everything is right; a test spoils one thing."""

    folder: Path
    host: Host
    sections: dict[str, Any]
    gpus: list[Gpu]
    driver: Driver = DRIVER

    @property
    def config(self) -> Config:
        return Config.model_validate(self.sections)

    def use_gpus(self, *gpus: Gpu) -> None:
        self.gpus[:] = gpus
        self.sections["gpus"] = [gpu.name_in_cdi for gpu in gpus]

    def change_model(self, name: str, **changes: Any) -> None:
        path = self.folder / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def run(self) -> dict[str, Finding]:
        findings, _ = run_preflight(self.config, self.host)
        assert [finding.check for finding in findings] == NAMES
        return {finding.check: finding for finding in findings}

    def failed(self) -> dict[str, ApplianceError]:
        return {name: finding.error for name, finding in self.run().items() if finding.error is not None}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    make_checkpoint(tmp_path / "target", TARGET)
    make_checkpoint(tmp_path / "drafter", DRAFTER, tokenizer=False)
    for name in ("secrets", "cache", "tmp", "cgroup"):
        (tmp_path / name).mkdir()
    (tmp_path / "secrets" / "ddtree-api-key").write_text(f"{KEY}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable:   16777216 kB\n")
    sections = {
        "engine": {"model": f"{tmp_path}/target", "drafter": f"{tmp_path}/drafter"},
        "gpus": ["0"],
        "paths": {"models": str(tmp_path)},
    }
    gpus = [H200]
    host = Host(
        in_container=True,
        environment={"PATH": "/usr/bin"},
        interfaces=lambda: ["lo", "eth0"],
        bind=lambda address, port: None,
        secrets=tmp_path / "secrets",
        cache=tmp_path / "cache",
        temporary=tmp_path / "tmp",
        shm=tmp_path,
        meminfo=tmp_path / "meminfo",
        cgroup=tmp_path / "cgroup",
    )
    made = Bench(tmp_path, host, sections, gpus)
    host.see_gpus = lambda: (made.driver, made.gpus)
    return made


def on_cpu(bench: Bench) -> None:
    bench.sections["engine"] |= {"device": "cpu", "dtype": "float32", "kv_tokens": 16384, "context_length": 1024}
    bench.sections["gpus"] = []
    bench.host.see_gpus = lambda: pytest.fail("a rehearsal asks for no GPU")


def test_a_sound_host_passes_and_says_what_it_has(bench: Bench) -> None:
    found = bench.run()
    assert [finding.detail for finding in found.values()] == [
        f"{bench.folder}/target and {bench.folder}/drafter are complete",
        "the drafter fits the target, block size 16",
        "context 16384 of 40960; a full batch of 8 verifies 256 tokens",
        "no variable that changes what is served",
        "1 keys are readable",
        found["folders"].detail,
        found["shm"].detail,
        "0.0.0.0:30000 is free",
        "driver 580.159.04: NVIDIA H200 (139.00 GiB free)",
        found["memory"].detail,
    ]
    assert found["folders"].detail.startswith(f"{bench.folder}/cache and {bench.folder}/tmp are writable, ")
    assert found["memory"].detail.startswith("131584 of ")
    assert all(finding.error is None for finding in found.values())


@pytest.mark.parametrize("row", MEASURED_TREES, ids=lambda row: f"{row['concurrency']}x{row['budget']}")
def test_the_preflight_names_the_trees_that_were_no_faster_than_a_chain(row: dict[str, Any], bench: Bench) -> None:
    requests, budget = row["concurrency"], row["budget"]
    bench.sections["engine"] |= {"max_running_requests": requests, "guarantee_context": False}
    bench.sections["ddtree"] = {"budget": budget}
    _, _, said = bench.run()["shape"].detail.partition("; ")
    assert said.startswith(f"a full batch of {requests} verifies {requests * (budget + 1)} tokens")
    was_no_faster = row["ratio_to_dflash"] < 1 or row["within_noise"]
    assert ("no faster than with DFLASH; ddtree.budget: 15 was faster up to 32 requests" in said) == was_no_faster


def test_trees_of_15_nodes_were_always_faster_than_a_chain() -> None:
    rows = [row for row in MEASURED_TREES if row["budget"] == 15]
    assert {row["concurrency"] for row in rows} == {1, 2, 4, 8, 16, 32}
    assert all(row["ratio_to_dflash"] > 1 and not row["within_noise"] for row in rows)


def test_a_rehearsal_is_told_nothing_of_a_gpus_speed(bench: Bench) -> None:
    on_cpu(bench)
    bench.sections["ddtree"] = {"budget": 128}
    assert bench.run()["shape"].detail.endswith("a full batch of 8 verifies 1032 tokens")


def test_facts_are_kept_for_the_start(bench: Bench) -> None:
    findings, facts = run_preflight(bench.config, bench.host)
    raise_failed(findings)
    assert facts.target is not None and facts.target.float_elements == 8 + 128
    assert (facts.driver, facts.gpus) == (DRIVER, [H200])
    assert facts.plan is not None and facts.plan.problems == ()


def test_a_rehearsal_needs_neither_gpu_nor_shared_memory(bench: Bench) -> None:
    on_cpu(bench)
    found = bench.run()
    assert {name: finding.detail for name, finding in found.items() if finding.detail == NOT_HERE} == {
        "shm": NOT_HERE,
        "gpus": NOT_HERE,
    }
    assert not any(finding.error for finding in found.values())


def test_outside_a_container_its_secrets_and_folders_are_not_looked_for(bench: Bench) -> None:
    bench.host.in_container = False
    bench.host.secrets = bench.host.cache = bench.folder / "nowhere"
    found = bench.run()
    assert [name for name, finding in found.items() if finding.detail == NOT_HERE] == ["keys", "folders"]
    assert not any(finding.error for finding in found.values())


# One thing wrong. Each row spoils the bench; then exactly this check fails with exactly these words.

Spoil = Callable[[Bench], Any]
Problem = tuple[str, type[ApplianceError], str]


def spoiled(bench: Bench, spoil: Spoil) -> tuple[str, ApplianceError]:
    spoil(bench)
    failed = bench.failed()
    assert len(failed) == 1, failed
    return failed.popitem()


def engine(**changes: Any) -> Spoil:
    return lambda bench: bench.sections["engine"].update(changes)


def variable(name: str, value: str) -> Spoil:
    return lambda bench: setattr(bench.host, "environment", {name: value})


def model(name: str, **changes: Any) -> Spoil:
    return lambda bench: bench.change_model(name, **changes)


def both_models(**changes: Any) -> Spoil:
    return lambda bench: [bench.change_model(name, **changes) for name in ("target", "drafter")]


def gpus(*found: Gpu) -> Spoil:
    return lambda bench: bench.use_gpus(*found)


def several(*spoils: Spoil) -> Spoil:
    return lambda bench: [spoil(bench) for spoil in spoils]


def quantised(place: str, section: dict[str, Any]) -> Spoil:
    def spoil(bench: Bench) -> None:
        if place == "config.json":
            bench.change_model("target", quantization_config=section)
        else:
            (bench.folder / "target" / place).write_text(json.dumps({"quantization": section}))

    return spoil


def gpu(place: str = "0", **changes: Any) -> Gpu:
    fields = {"uuid": f"GPU-{place}", "name": "NVIDIA H200", "capability": (9, 0), "total_bytes": 140 * GIB}
    return Gpu(name_in_cdi=place, **{**fields, "free_bytes": 139 * GIB, **changes})


def secret(content: str | None, name: str = "ddtree-api-key") -> Spoil:
    def spoil(bench: Bench) -> None:
        path = bench.folder / "secrets" / name
        path.unlink() if content is None else path.write_text(content)

    return spoil


@pytest.mark.parametrize(
    "spoil,check,kind,message",
    [
        # pair
        (
            model("drafter", hidden_size=2048),
            "pair",
            UsageError,
            "target and drafter do not belong together: hidden_size differs: target 4096, drafter 2048",
        ),
        (
            lambda bench: bench.sections.update(ddtree={"block_size": 8}),
            "pair",
            UsageError,
            "target and drafter do not belong together: ddtree.block_size is 8, the drafter's 16",
        ),
        (
            model("drafter", architectures=["Qwen3ForCausalLM"], block_size=None),
            "pair",
            UsageError,
            "target and drafter do not belong together: the drafter's architecture is ['Qwen3ForCausalLM'], not "
            "DFlashDraftModel; the drafter names no block_size",
        ),
        # shape
        (
            engine(context_length=40961, max_running_requests=1),
            "shape",
            UsageError,
            "engine.context_length 40961 is beyond the target's 40960; engine.context_length 40961 is beyond the "
            "drafter's 40960",
        ),
        (
            several(model("target", max_position_embeddings=131072), engine(context_length=65536)),
            "shape",
            UsageError,
            "engine.context_length 65536 is beyond the drafter's 40960",
        ),
        (
            several(
                model("target", max_position_embeddings=131072), engine(context_length=None, guarantee_context=False)
            ),
            "shape",
            UsageError,
            "the target's context 131072 is beyond the drafter's 40960",
        ),
        (
            several(
                model("target", num_attention_heads=20, num_key_value_heads=4),
                gpus(*[gpu(str(place)) for place in range(8)]),
            ),
            "shape",
            UsageError,
            "the target's 20 heads (4 for KV) do not divide over 8",
        ),
        (
            several(both_models(num_attention_heads=20), gpus(gpu("0"), gpu("1"), gpu("2"))),
            "shape",
            UsageError,
            "the target's 20 heads (8 for KV) do not divide over 3; the drafter's 20 heads (8 for KV) do not divide "
            "over 3",
        ),
        (
            several(
                model("target", num_attention_heads=30, num_key_value_heads=10), gpus(gpu("0"), gpu("1"), gpu("2"))
            ),
            "shape",
            UsageError,
            "the target's 30 heads (10 for KV) do not divide over 3; the drafter's 32 heads (8 for KV) do not divide "
            "over 3",
        ),
        (
            quantised("config.json", {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
            "shape",
            UsageError,
            "the target's checkpoint asks for an FP8 KV pool, which is unproved with trees",
        ),
        (
            quantised("config.json", {"quant_algo": "NVFP4", "kv_cache_scheme": {"type": "float", "num_bits": 8}}),
            "shape",
            UsageError,
            "the target's checkpoint asks for an FP8 KV pool, which is unproved with trees",
        ),
        (
            quantised("hf_quant_config.json", {"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}),
            "shape",
            UsageError,
            "the target's checkpoint asks for an FP8 KV pool, which is unproved with trees",
        ),
        # environment
        *[
            (variable(name, "1"), "environment", HostError, f"{name} = 1: {reason}")
            for name, reason in REFUSED_ENVIRONMENT.items()
        ],
        (
            variable("GLOO_SOCKET_IFNAME", "eth1"),
            "environment",
            HostError,
            "GLOO_SOCKET_IFNAME names eth1; there are eth0, lo",
        ),
        (
            variable("GLOO_SOCKET_IFNAME", "eth"),
            "environment",
            HostError,
            "GLOO_SOCKET_IFNAME names eth; there are eth0, lo",
        ),
        (
            variable("NCCL_SOCKET_IFNAME", "eth0,ib0,ib1"),
            "environment",
            HostError,
            "NCCL_SOCKET_IFNAME names ib0, ib1; there are eth0, lo",
        ),
        (
            variable("NCCL_SOCKET_IFNAME", "=eth"),
            "environment",
            HostError,
            "NCCL_SOCKET_IFNAME names eth; there are eth0, lo",
        ),
        (
            variable("TP_SOCKET_IFNAME", "bond0"),
            "environment",
            HostError,
            "TP_SOCKET_IFNAME names bond0; there are eth0, lo",
        ),
        (
            variable("FLASHINFER_DISABLE_VERSION_CHECK", "1"),
            "environment",
            HostError,
            "FLASHINFER_DISABLE_VERSION_CHECK: mixed flashinfer packages read illegal memory",
        ),
        (
            variable("CUDA_VISIBLE_DEVICES", "1"),
            "environment",
            HostError,
            "CUDA_VISIBLE_DEVICES: the configuration's gpus are what the container sees",
        ),
        # keys
        (
            secret("short\n"),
            "keys",
            HostError,
            "the secret {folder}/secrets/ddtree-api-key has 5 characters; a key has 16 to 512",
        ),
        (
            secret(None),
            "keys",
            HostError,
            "the secret {folder}/secrets/ddtree-api-key cannot be read: No such file or directory",
        ),
        (
            several(
                lambda bench: bench.sections.update(server={"admin_key_secret": "other"}),
                secret(KEY, "ddtree-admin-key"),
            ),
            "keys",
            HostError,
            "both secrets hold the same key: every user could manage the engine",
        ),
        # gpus
        (
            lambda bench: setattr(bench, "driver", Driver("575.57", (12, 9))),
            "gpus",
            HostError,
            "driver 575.57 runs CUDA 12.9; the image needs 13.0, driver 580 or newer",
        ),
        (
            lambda bench: bench.gpus.append(gpu("1")),
            "gpus",
            HostError,
            "2 GPUs are visible, gpus names 1",
        ),
        (lambda bench: bench.gpus.clear(), "gpus", HostError, "0 GPUs are visible, gpus names 1"),
        (
            gpus(gpu(name="NVIDIA GB10", capability=(12, 1))),
            "gpus",
            HostError,
            "NVIDIA GB10 has compute capability 12.1; served are 9.0, 10.0, 12.0",
        ),
        (
            gpus(gpu(name="NVIDIA A100", capability=(8, 0))),
            "gpus",
            HostError,
            "NVIDIA A100 has compute capability 8.0; served are 9.0, 10.0, 12.0",
        ),
        # memory
        (
            gpus(gpu("0", free_bytes=139 * GIB), gpu("1", free_bytes=120 * GIB, users=((4711, 19 * GIB),))),
            "memory",
            HostError,
            "free memory differs between the GPUs: GPU 0 139.00 GiB free; GPU 1 120.00 GiB free (pid 4711 19.00 GiB)",
        ),
    ],
)
def test_one_thing_wrong_fails_one_check(
    spoil: Spoil, check: str, kind: type[ApplianceError], message: str, bench: Bench
) -> None:
    name, error = spoiled(bench, spoil)
    assert (name, type(error)) == (check, kind)
    assert error.message == message.replace("{folder}", str(bench.folder))
    assert error.hint


# What must not be refused


@pytest.mark.parametrize(
    "spoil",
    [
        engine(context_length=40960, max_running_requests=1),
        engine(context_length=None, guarantee_context=False),
        model("target", max_position_embeddings=131072),
        lambda bench: bench.sections.update(ddtree={"block_size": 16}),
        # FP8 weights alone, a KV type that is set, and a scheme that SGLang does not read
        quantised("config.json", {"quant_algo": "FP8", "kv_cache_quant_algo": None}),
        quantised("config.json", {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float"}}),
        several(
            quantised("config.json", {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}), engine(kv_dtype="bfloat16")
        ),
        # variables that are off, or name what is there
        *[variable(name, value) for name in REFUSED_ENVIRONMENT for value in ("", "0", "false")],
        variable("GLOO_SOCKET_IFNAME", "eth0"),
        variable("NCCL_SOCKET_IFNAME", "eth"),
        variable("NCCL_SOCKET_IFNAME", "=eth0"),
        variable("NCCL_SOCKET_IFNAME", "^docker0,ib0"),
        variable("NCCL_SOCKET_IFNAME", ""),
        variable("CUDA_VISIBLE_DEVICES", ""),
        variable("FLASHINFER_DISABLE_VERSION_CHECK", ""),
        several(variable("CUDA_VISIBLE_DEVICES", "1"), lambda bench: setattr(bench.host, "in_container", False)),
        # keys
        secret(f"{KEY}\r\n"),
        several(lambda bench: bench.sections.update(server={"api_key_secret": None}), secret(None)),
        # drivers and cards
        lambda bench: setattr(bench, "driver", Driver("610.3", (14, 0))),
        *[gpus(gpu(capability=capability)) for capability in CAPABILITIES],
        gpus(gpu("0"), gpu("1"), gpu("2"), gpu("3")),
        gpus(gpu("0:1", uuid="MIG-a")),
        gpus(gpu("0", free_bytes=139 * GIB), gpu("1", free_bytes=126 * GIB)),
    ],
)
def test_what_is_right_is_not_refused(spoil: Spoil, bench: Bench) -> None:
    spoil(bench)
    assert bench.failed() == {}


# Models


def test_everything_wrong_with_both_models_is_told(bench: Bench) -> None:
    (bench.folder / "target" / "tokenizer.json").unlink()
    (bench.folder / "drafter" / "model.safetensors").write_bytes(b"")
    found = bench.run()
    assert found["models"].detail == (
        f"{bench.folder}/target is no complete checkpoint: it holds no tokenizer (tokenizer.json, tokenizer.model, "
        f"vocab.json, tiktoken.model); {bench.folder}/drafter is no complete checkpoint: model.safetensors is cut short"
    )
    assert [found[name].detail for name in ("pair", "shape", "memory")] == [NOT_CHECKED] * 3
    assert [name for name, finding in found.items() if finding.error] == ["models"]


def test_a_drafter_alone_is_not_compared(bench: Bench) -> None:
    bench.sections["engine"]["model"] = f"{bench.folder}/nowhere"
    found = bench.run()
    assert found["models"].detail == f"{bench.folder}/nowhere does not exist on this host"
    assert found["pair"].detail == NOT_CHECKED


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    [*DRAFTER, "text_config", "quantization_config", "rope_scaling", "rope_parameters", "layer_types", "torch_dtype"]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    target=st.dictionaries(FIELDS, ANYTHING, max_size=3),
    drafter=st.dictionaries(FIELDS, ANYTHING, max_size=3),
    quantization=ANYTHING,
    tp_size=st.sampled_from([1, 2]),
    limit=st.booleans(),
)
def test_no_configuration_file_raises_anything_but_an_appliance_error(
    target: dict[str, Any], drafter: dict[str, Any], quantization: Any, tp_size: int, limit: bool, bench: Bench
) -> None:
    for name, base, changes in (("target", TARGET, target), ("drafter", DRAFTER, drafter)):
        (bench.folder / name / "config.json").write_text(json.dumps({**base, **changes}))
    (bench.folder / "target" / "hf_quant_config.json").write_text(json.dumps(quantization))
    bench.use_gpus(*[gpu(str(place)) for place in range(tp_size)])
    bench.sections["engine"] |= {"context_length": 4096 if limit else None, "guarantee_context": limit}
    bench.run()


def test_a_configuration_of_no_model_is_said_to_be_one(bench: Bench) -> None:
    bench.change_model("target", num_attention_heads="many")
    found = bench.run()
    for name in ("shape", "memory"):
        assert found[name].detail == (
            "a config.json does not describe a model as the engine knows them: ValueError: invalid literal for int() "
            "with base 10: 'many'"
        )
    assert isinstance(found["shape"].error, HostError)


# Folders, shared memory, port


def test_folders_must_be_writable(bench: Bench) -> None:
    bench.host.cache = bench.folder / "nowhere"
    error = bench.failed()["folders"]
    assert error.message == f"{bench.folder}/nowhere is not writable as user {os.geteuid()}"

    def prepare(folder: Path) -> Host:
        (folder / "cache").mkdir(mode=0o755)
        (folder / "tmp").mkdir(mode=0o1777)
        (folder / "tmp").chmod(0o500)
        return Host(in_container=True, cache=folder / "cache", temporary=folder / "tmp")

    with as_nobody(prepare) as host:
        if os.stat(host.cache).st_uid == os.geteuid():
            pytest.skip("needs root, to make a folder of another user")
        with pytest.raises(HostError) as caught:
            host_checks.folders(Facts(bench.config), host)
        both = (host.cache, host.temporary)
        assert caught.value.message == "; ".join(f"{path} is not writable as user {os.geteuid()}" for path in both)


Usage = namedtuple("Usage", "total used free")


def with_disk(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda path: Usage(total, total - free, free))


@pytest.mark.parametrize("free,device,fits", [(GIB, "cuda", True), (GIB - 1, "cuda", False), (0, "cpu", True)])
def test_the_cache_needs_room_for_kernels(
    free: int, device: str, fits: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_disk(monkeypatch, 100 * GIB, free)
    if device == "cpu":
        on_cpu(bench)
    failed = bench.failed()
    assert list(failed) == ([] if fits else ["folders"])
    if not fits:
        assert failed["folders"].message == f"{bench.host.cache} has 1.00 GiB free; compiled kernels need 1.00 GiB"
        assert "ddtree-cache" in (failed["folders"].hint or "")


@pytest.mark.parametrize(
    "ranks,total,fits", [(1, GIB, True), (1, 64 << 20, False), (4, 4 * GIB, True), (4, GIB, False)]
)
def test_shared_memory_grows_with_the_ranks(
    ranks: int, total: int, fits: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_disk(monkeypatch, total, GIB)
    bench.use_gpus(*[gpu(str(place)) for place in range(ranks)])
    failed = bench.failed()
    assert list(failed) == ([] if fits else ["shm"])
    if not fits:
        assert f"{ranks} ranks need {ranks}.00 GiB" in failed["shm"].message
        assert f"--shm-size={4 * ranks}g" in (failed["shm"].hint or "")


def test_shared_memory_that_is_not_there_is_a_host_error(bench: Bench) -> None:
    bench.host.shm = bench.folder / "nowhere"
    failed = bench.failed()
    assert list(failed) == ["shm"]
    assert isinstance(failed["shm"], HostError)
    assert "nowhere" in failed["shm"].message


@pytest.mark.parametrize("address,family", [("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)])
def test_a_port_in_use_is_found_by_taking_it(address: str, family: socket.AddressFamily, bench: Bench) -> None:
    bench.host.in_container = False
    bench.host.bind = checks.bind
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.strip("[]"), 0))
        except OSError:
            pytest.skip("no such address here")
        listener.listen()
        port = listener.getsockname()[1]
        bench.sections["server"] = {"host": address, "port": port}
        error = bench.failed()["port"]
        assert error.message == f"port {port} on {address.strip('[]')} is not free: Address already in use"
        assert error.hint == f"stop what listens there: ss -ltnp sport = :{port}"
    assert bench.failed() == {}


def test_a_connection_that_is_still_closing_does_not_block_the_port(bench: Bench) -> None:
    """As after a restart: the last server's connections linger for a minute."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
    accepted.close()  # this side closes first and keeps the port in TIME_WAIT
    client.recv(1)
    client.close()
    checks.bind("127.0.0.1", port)


def test_in_the_container_the_engines_own_port_is_tried(bench: Bench) -> None:
    tried = []
    bench.host.bind = lambda address, port: tried.append((address, port))
    bench.sections["server"] = {"host": "127.0.0.1", "port": 8080}
    bench.run()
    bench.host.in_container = False
    bench.run()
    assert tried == [("0.0.0.0", 30000), ("127.0.0.1", 8080)]


# GPUs and memory


def test_several_problems_of_the_gpus_are_told_at_once(bench: Bench) -> None:
    bench.driver = Driver("550.1", (12, 4))
    bench.gpus[:] = [gpu("0", name="A", capability=(8, 6)), gpu("1", name="B", capability=(7, 5))]
    found = bench.run()
    assert found["gpus"].detail.split("; ") == [
        "driver 550.1 runs CUDA 12.4",
        "the image needs 13.0, driver 580 or newer",
        "2 GPUs are visible, gpus names 1",
        "A has compute capability 8.6",
        "served are 9.0, 10.0, 12.0",
        "B has compute capability 7.5",
        "served are 9.0, 10.0, 12.0",
    ]
    assert found["memory"].detail == NOT_CHECKED


def test_nvml_errors_are_findings(bench: Bench) -> None:
    def refuse() -> tuple[Driver, list[Gpu]]:
        raise HostError("NVML does not start: Driver Not Loaded", "modprobe nvidia")

    bench.host.see_gpus = refuse
    found = bench.run()
    assert found["gpus"].detail == "NVML does not start: Driver Not Loaded"
    assert found["memory"].detail == NOT_CHECKED


def test_on_the_host_only_the_named_gpus_count(bench: Bench) -> None:
    """The others may be old, busy or missing."""
    bench.host.in_container = False
    old = gpu("0", name="old", capability=(7, 0), free_bytes=0)
    named = gpu("1", uuid="GPU-00000000-0000-0000-0000-00000000000b")
    bench.gpus[:] = [old, named]
    for name in (named.name_in_cdi, named.uuid):
        bench.sections["gpus"] = [name]
        findings, facts = run_preflight(bench.config, bench.host)
        raise_failed(findings)
        assert facts.gpus == [named]
    bench.sections["gpus"] = ["3"]
    assert bench.failed()["gpus"].message == f"gpus names 3; there are 0 GPU-0, 1 {named.uuid}"


def test_a_plan_that_does_not_fit_is_the_configurations_fault(bench: Bench) -> None:
    bench.sections["engine"] |= {"context_length": 40960, "max_running_requests": 64}
    name, error = spoiled(bench, lambda bench: None)
    assert (name, type(error)) == ("memory", UsageError)
    assert error.message.startswith("64 requests of 40960 tokens and a reserve of 64 per request need 2625536 tokens; ")
    assert "guarantee_context: false" in (error.hint or "")


def test_a_plan_that_fits_idle_gpus_is_the_hosts_fault(bench: Bench) -> None:
    bench.use_gpus(gpu(free_bytes=20 * GIB, users=((99, 119 * GIB),)))
    name, error = spoiled(bench, lambda bench: None)
    assert (name, type(error)) == ("memory", HostError)
    assert error.message.endswith("; on idle GPUs it would fit: GPU 0 20.00 GiB free (pid 99 119.00 GiB)")


def test_the_plan_is_kept_also_if_it_does_not_fit(bench: Bench) -> None:
    bench.sections["engine"]["max_running_requests"] = 200
    _, facts = run_preflight(bench.config, bench.host)
    assert facts.plan is not None and facts.plan.problems


@pytest.mark.parametrize(
    "limit,used,available",
    [
        (None, None, 16 * GIB),
        ("max", "1", 16 * GIB),
        (str(32 * GIB), "0", 16 * GIB),
        (str(GIB), str(GIB // 4), 3 * GIB // 4),
    ],
)
def test_on_a_cpu_the_containers_limit_counts(
    limit: str | None, used: str | None, available: int, bench: Bench
) -> None:
    on_cpu(bench)
    for name, content in (("memory.max", limit), ("memory.current", used)):
        if content is not None:
            (bench.folder / "cgroup" / name).write_text(f"{content}\n")
    _, facts = run_preflight(bench.config, bench.host)
    assert facts.plan is not None
    assert facts.plan.free_bytes == available


def test_meminfo_without_the_number_is_a_host_error(bench: Bench) -> None:
    on_cpu(bench)
    (bench.folder / "meminfo").write_text("MemTotal: 1 kB\n")
    assert bench.failed()["memory"].message == f"{bench.folder}/meminfo has no MemAvailable"


# All together


def spoil_everything(bench: Bench) -> None:
    bench.change_model("drafter", hidden_size=1)
    bench.sections["engine"] |= {"context_length": 50000, "max_running_requests": 200}
    bench.host.environment = {"TP_SOCKET_IFNAME": "x"}
    bench.host.cache = bench.host.shm = bench.folder / "nowhere"
    bench.driver = Driver("550.1", (12, 4))
    secret("short")(bench)

    def refuse(address: str, port: int) -> None:
        raise OSError(98, "Address already in use")

    bench.host.bind = refuse


def test_all_that_failed_is_one_error_in_the_order_of_the_checks(bench: Bench) -> None:
    spoil_everything(bench)
    findings, _ = run_preflight(bench.config, bench.host)
    with pytest.raises(HostError) as caught:
        raise_failed(findings)
    lines = caught.value.message.removeprefix("preflight: ").split("\n  ")
    assert [line.partition(": ")[0] for line in lines] == [
        "pair",
        "shape",
        "environment",
        "keys",
        "folders",
        "shm",
        "port",
        "gpus",
    ]
    assert lines == [f"{finding.check}: {finding.detail}" for finding in findings if finding.error]
    assert KEY not in caught.value.message
    hints = (caught.value.hint or "").split("\n  ")
    assert len(hints) == len(set(hints)) == 8


@pytest.mark.parametrize(
    "errors,kind",
    [
        ([UsageError("a")], UsageError),
        ([HostError("a")], HostError),
        ([UsageError("a"), HostError("b")], HostError),
        ([HostError("a"), UsageError("b")], HostError),
        ([UsageError("a"), UsageError("b")], UsageError),
    ],
)
def test_the_host_at_fault_anywhere_decides_the_exit_code(
    errors: list[ApplianceError], kind: type[ApplianceError]
) -> None:
    findings = [Finding("fine", "good"), *[Finding(f"c{n}", e.message, e) for n, e in enumerate(errors)]]
    with pytest.raises(kind) as caught:
        raise_failed(findings)
    assert caught.value.message == "preflight: " + "\n  ".join(f"c{n}: {e.message}" for n, e in enumerate(errors))
    assert caught.value.hint is None


def test_nothing_wrong_raises_nothing() -> None:
    raise_failed([Finding("fine", "good"), Finding("other", NOT_HERE)])


def test_the_real_edges_of_this_host_answer() -> None:
    host = Host()
    assert "lo" in host.interfaces()
    assert host.meminfo.exists()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    host.bind("127.0.0.1", free)
