"""The appliance's configuration: every key, its type, its default and what it means.

Defaults live here and nowhere else. `config/appliance.yaml` and its JSON schema are written from these models by
`scripts/write-config-sample`; rules that span several keys are rows of `config_rules`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from ddtree_appliance.ddtree.limits import MAX_BUDGET, MAX_TOPK

BUNDLED = ("bundled:target", "bundled:drafter")
CDI_VENDOR = "nvidia.com/gpu="


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _plain_text(value: str) -> str:
    if not value or value != value.strip() or not value.isprintable():
        raise ValueError("must be printable text without blanks around it")
    return value


def _model_location(value: str) -> str:
    _plain_text(value)
    if value in BUNDLED or _is_hub_name(value):
        return value
    if value.startswith("bundled:"):
        raise ValueError(f"is not in the image, which holds {' and '.join(BUNDLED)}")
    if not value.startswith("/"):
        raise ValueError(f"must be an absolute path, a hub name ORG/NAME, {' or '.join(BUNDLED)}")
    return _absolute_path(value)


def _is_hub_name(value: str) -> bool:
    # The hub's own rule; the cache names a model's folder with -- in place of the slash.
    part = "[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
    return re.fullmatch(f"{part}/{part}", value) is not None and "--" not in value and ".." not in value


def _absolute_path(value: str) -> str:
    _plain_text(value)
    if not value.startswith("/") or ".." in value.split("/"):
        raise ValueError("must be an absolute path without ..")
    if re.search(r"""[\s:"'\\$]""", value):
        raise ValueError("must not contain blanks, colons, quotes, backslashes or dollar signs: units cannot hold them")
    return "/" + "/".join(part for part in value.split("/") if part not in ("", "."))


def _gpu_name(value: str) -> str:
    name = value.removeprefix(CDI_VENDOR)
    if name == "all":
        raise ValueError("would change with the host: name each GPU")
    index = "(0|[1-9][0-9]{0,2})"
    uuid = re.fullmatch("(GPU|MIG)-([0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})", name)
    if uuid is None and not re.fullmatch(f"{index}(:{index})?", name):
        raise ValueError('is no CDI name: an index ("0"), GPU-UUID, MIG-UUID or a MIG slice ("0:1")')
    return f"{uuid[1]}-{uuid[2].lower()}" if uuid else name  # CDI compares letters, and its own are small


def _podman_name(value: str) -> str:
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}", value):
        raise ValueError("must be at most 63 letters, digits, '_', '.' and '-', beginning with a letter or digit")
    return value


def _address(value: str) -> str:
    is_version_6 = value.startswith("[") and value.endswith("]") and "%" not in value  # podman takes no zone
    try:
        ipaddress.IPv6Address(value[1:-1]) if is_version_6 else ipaddress.IPv4Address(value)
    except ValueError:
        message = 'must be an IPv4 address, or a quoted IPv6 address in brackets ("[::1]"): podman publishes no names'
        raise ValueError(message) from None
    return value


def _image(value: str) -> str:
    # The grammar of registries: HOST[:PORT]/ is one that holds a dot or a port, or is localhost.
    host = r"((?=[^/]*[.:])[a-zA-Z0-9][a-zA-Z0-9.-]*|localhost)(:[0-9]{1,5})?/"
    part = "[a-z0-9]+(([.]|__?|-+)[a-z0-9]+)*"
    name, at, digest = value.partition("@")
    parts = re.fullmatch(f"({host})?{part}(/{part})*(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}))?", name)
    if parts is None:
        raise ValueError("is no image name: [HOST[:PORT]/]NAME:TAG or NAME@sha256:..., NAME in small letters")
    if at and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError("must end in sha256: and 64 hexadecimal digits after the @")
    if not at and not parts["tag"]:
        raise ValueError("needs a tag or a digest: without one, podman takes latest")
    if not at and parts["tag"] == "latest" and not value.startswith("localhost/"):
        raise ValueError("changes without notice: pin a remote image by its digest (NAME@sha256:...)")
    return value


Text = Annotated[str, AfterValidator(_plain_text)]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path)]
ModelLocation = Annotated[str, AfterValidator(_model_location)]
GpuName = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # an index without quotes
    AfterValidator(_gpu_name),
    WithJsonSchema({"type": ["string", "integer"]}),
]
PodmanName = Annotated[str, AfterValidator(_podman_name)]
Address = Annotated[str, AfterValidator(_address)]
ImageName = Annotated[str, AfterValidator(_image)]
Revision = Annotated[str, StringConstraints(pattern="^[0-9a-f]{40}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[int, Field(ge=1, le=86400)]


class EngineConfig(_Section):
    """The model and how SGLang runs it."""

    device: Literal["cuda", "cpu"] = Field("cuda", description="cuda, or cpu for a rehearsal without a GPU.")
    model: ModelLocation = Field(
        description="The target: an absolute path below paths.models (the same inside the container), a hub name "
        "ORG/NAME that is already in the hub cache there (with model_revision), or bundled:target.",
        examples=["/srv/models/target"],
    )
    drafter: ModelLocation = Field(
        description="The DFlash drafter trained for the target; located as model is.", examples=["/srv/models/drafter"]
    )
    model_revision: Revision | None = Field(
        None, description="Commit of the target's hub snapshot. A model found at another commit is refused."
    )
    drafter_revision: Revision | None = Field(None, description="Commit of the drafter's hub snapshot.")
    served_model_name: Text | None = Field(None, description="The name in the API; null: the model's location.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint. Leave it off unless the model needs it."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Compute type of target and drafter; auto: the target's own."
    )
    context_length: Annotated[int, Field(ge=64, le=1 << 21)] | None = Field(
        16384, description="Longest prompt and answer together, in tokens; null: the model's own limit."
    )
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = Field(
        8, description="Requests decoded at the same time; more wait in the queue."
    )
    guarantee_context: bool = Field(
        True,
        description="Refuse to start unless max_running_requests of context_length tokens fit the KV pool. false: a "
        "full pool retracts requests and computes them again later.",
    )
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.85, description="Share of the GPU's memory for weights and KV pool; the rest is for activations and graphs."
    )
    kv_tokens: Annotated[int, Field(ge=64)] | None = Field(
        None, description="Size of the KV pool in tokens; null: what memory_fraction leaves. Required for device cpu."
    )
    attention_backend: Literal["auto", "triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "torch_native"] = Field(
        "auto", description="Kernels of attention; auto: the one proved for trees on this device."
    )
    page_size: Annotated[int, Field(ge=1, le=256)] = Field(1, description="KV slots per page: a power of two.")
    kv_dtype: Literal["auto", "bfloat16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1"] = Field(
        "auto", description="Type of the KV pool; auto: the compute type. Quantised KV is refused until it is proved."
    )
    quantization: Text | None = Field(
        None, description="SGLang's name of the target's quantisation; null: as the checkpoint says."
    )
    drafter_quantization: Text | None = Field(
        None,
        description="The drafter's: unquant or a name. Must be set when quantization is: SGLang would silently use the "
        "target's for both.",
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further SGLang flags without their dashes, for example chunked-prefill-size: 4096. Flags that "
        "another key of this file sets, that DDTREE refuses or that are unknown are errors.",
    )


class DDTreeConfig(_Section):
    """The draft tree."""

    budget: Annotated[int, Field(ge=1, le=MAX_BUDGET)] = Field(
        31,
        description="Node budget: draft nodes per request and verify step; best one less than a multiple of 16. On an"
        " H200 31 was good with up to 4 requests at once, 15 with up to 32.",
    )
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] = Field(16, description="Candidate tokens per position.")
    block_size: Annotated[int, Field(ge=2, le=256)] | None = Field(
        None, description="The drafter's block size, to be checked against its configuration; null: taken from it."
    )


class ServerConfig(_Section):
    """The published API."""

    host: Address = Field("0.0.0.0", description='Address of the host on which the API is published; IPv6 as "[::]".')
    port: Port = Field(30000, description="Port of the API on the host.")
    api_key_secret: PodmanName | None = Field(
        "ddtree-api-key", description="Name of the podman secret that holds the API key; null: no key."
    )
    admin_key_secret: PodmanName | None = Field(
        None,
        description="Name of the podman secret with the key for SGLang's management endpoints; null: off.",
    )
    allow_unauthenticated: bool = Field(
        False, description="Accept api_key_secret: null although host is no loopback address."
    )
    tls: Literal["offloaded"] = Field(
        "offloaded", description="TLS is terminated by a proxy in front; the engine speaks HTTP only."
    )


class HealthConfig(_Section):
    """The sidecar, and podman's checks of the engine."""

    host: Address = Field(
        "0.0.0.0", description='Address of the host on which the sidecar is published; IPv6 as "[::]".'
    )
    port: Port = Field(30001, description="Port of the sidecar on the host.")
    interval_s: Seconds = Field(5, description="The sidecar looks at the engine this often.")
    busy_after_s: Seconds = Field(10, description="No batch finished for this long while requests run: busy.")
    heartbeat_limit_s: Seconds = Field(60, description="The scheduler's loop stood still for this long: stuck, killed.")
    progress_limit_s: Seconds = Field(
        180, description="The loop turns and requests run but no batch finished for this long: stalled, killed."
    )
    unreachable_limit_s: Seconds = Field(30, description="Not answering for this long after having been up: dead.")
    accept_length_floor: Annotated[float, Field(ge=1.0, le=256.0)] = Field(
        1.2, description="An accept length below this is degraded: the drafter stopped helping."
    )
    accept_length_min_steps: Annotated[int, Field(ge=1)] = Field(
        500, description="Verify steps over which the accept length is judged."
    )
    check_interval_s: Seconds = Field(30, description="podman runs the engine's health command this often.")
    check_timeout_s: Seconds = Field(10, description="A health command that takes longer has failed.")
    check_retries: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="So many failures in a row, and podman kills the engine; systemd starts it again."
    )
    startup_interval_s: Seconds = Field(5, description="podman asks this often whether the engine has become ready.")


class PathsConfig(_Section):
    """What the containers see of the host."""

    models: AbsolutePath | None = Field(
        "/srv/models", description="Folder of the models, mounted read-only at the same path; null: nothing is mounted."
    )
    cache_volume: PodmanName = Field(
        "ddtree-cache", description="podman volume for compiled kernels; kept across restarts and updates."
    )


class UnitConfig(_Section):
    """The systemd units and the containers' limits."""

    image: ImageName = Field(
        "localhost/ddtree-sglang:latest", description="The image; a remote one is pinned by its digest."
    )
    network: PodmanName = Field("ddtree", description="podman network of engine and sidecar.")
    user: Annotated[int, Field(ge=1, le=65534)] = Field(10001, description="User and group id inside the containers.")
    shm_size_gb: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="Size of /dev/shm, in GiB.")
    memory_limit_gb: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="Limit of the engine's host memory, in GiB; null: none."
    )
    pids_limit: Annotated[int, Field(ge=64, le=4194304)] = Field(4096, description="Processes and threads at most.")
    start_timeout_s: Seconds = Field(
        3600, description="systemctl start waits this long for the model to answer, weights and kernels included."
    )
    stop_timeout_s: Seconds = Field(60, description="Requests in flight may take this long to finish on a stop.")
    restart_delay_s: Seconds = Field(10, description="Pause before a crashed engine is started again.")
    restart_limit: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="So many starts within restart_window_s, then the unit is failed."
    )
    restart_window_s: Seconds = Field(7200, description="The window in which starts are counted.")
    selinux: Literal["confined", "disabled"] = Field(
        "confined", description="disabled: run the engine without SELinux confinement (SecurityLabelDisable)."
    )


class Config(_Section):
    """One appliance: one target, one drafter, one engine."""

    engine: EngineConfig
    ddtree: DDTreeConfig = DDTreeConfig()
    gpus: list[GpuName] = Field(
        default_factory=lambda: ["0"],
        description='CDI names of the GPUs: "0", GPU-UUID, MIG-UUID or a MIG slice "0:1". Tensor-parallel over all of '
        "them; UUIDs do not move when a card is added. Empty for device cpu.",
    )
    server: ServerConfig = ServerConfig()
    health: HealthConfig = HealthConfig()
    paths: PathsConfig = PathsConfig()
    unit: UnitConfig = UnitConfig()

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks: one per GPU, one on a CPU."""
        return max(len(self.gpus), 1)
