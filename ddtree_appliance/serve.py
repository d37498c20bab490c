"""The container's entry point: everything checked, then this process becomes SGLang.

Configuration errors exit with 2, host errors with 3: the unit does not restart either, since neither mends itself.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ddtree_appliance.checks import CACHE, Facts
from ddtree_appliance.config import Config
from ddtree_appliance.config_source import load_config
from ddtree_appliance.engine_args import sglang_arguments
from ddtree_appliance.errors import HostError, PatchError, UsageError
from ddtree_appliance.key_file import write_key_file
from ddtree_appliance.launch import KEY_FILE_VARIABLE, check_patched, sigterm_held
from ddtree_appliance.preflight import raise_failed, run_preflight
from ddtree_appliance.render import config_digest

# Every cache of compiled kernels that the engine's packages keep, below the folder for this image and GPU.
_CACHE_VARIABLES = {
    "XDG_CACHE_HOME": ".",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}


def serve(config_path: Path, rendered_for: str | None) -> NoReturn:
    """Check everything, then replace this process by SGLang's server. Raises UsageError or HostError instead.

    rendered_for: the digest of the configuration that the unit was made from; None if no unit was.
    """
    config = load_config(config_path)
    if rendered_for is not None and config_digest(config) != rendered_for:
        raise UsageError(
            f"{config_path} has changed since the units were made from it",
            f"ddtree-appliance install {config_path}, then start again",
        )
    try:
        check_patched()
    except PatchError as error:
        raise HostError(error.message, "the image is damaged: build or pull it again") from error
    findings, facts = run_preflight(config)
    for finding in findings:
        if finding.error is None:
            print(f"preflight check={finding.check} {finding.detail}", flush=True)
    raise_failed(findings)
    arguments = sglang_arguments(facts.config)
    environment = engine_environment(config, facts, os.environ)
    key_file = write_key_file(config)
    if key_file is not None:
        arguments += ["--config", str(key_file)]
        environment[KEY_FILE_VARIABLE] = str(key_file)
    print(f"starting sglang {' '.join(arguments)}", flush=True)
    with sigterm_held():
        os.execve(sys.executable, [sys.executable, "-m", "ddtree_appliance", "launch", "--", *arguments], environment)


def engine_environment(config: Config, facts: Facts, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment in which SGLang runs."""
    environment = {**inherited}
    if config.engine.device == "cpu":
        from ddtree_appliance.rehearsal.server import rehearsal_environment

        environment = rehearsal_environment(inherited=inherited)
    cache = CACHE / cache_key(facts)
    if os.access(CACHE, os.W_OK):
        environment.update({name: str(cache / folder) for name, folder in _CACHE_VARIABLES.items()})
    environment.update(
        {
            # /health answers at once whether the engine is up, instead of generating a token for every probe.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            # A stop's drain ends before podman kills, which the unit sets to strike later.
            "SGLANG_DRAIN_TIMEOUT": str(config.unit.stop_timeout_s),
            "HF_HUB_OFFLINE": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "PYTHONUNBUFFERED": "1",
        }
    )
    return environment


def cache_key(facts: Facts) -> str:
    """Names the cache folder: compiled kernels are good for one set of packages, one driver, one architecture."""
    from importlib.metadata import distributions

    packages = sorted(f"{dist.metadata['Name']}=={dist.version}" for dist in distributions())
    digest = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:12]
    if not facts.gpus or facts.driver is None:
        return f"{digest}-cpu"
    architectures = "-".join(sorted({"sm{}{}".format(*gpu.capability) for gpu in facts.gpus}))
    return f"{digest}-{facts.driver.version}-{architectures}"
