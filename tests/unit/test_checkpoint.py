"""Model folders: found offline, refused with every problem in them, and sized as safetensors sizes them."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_appliance.checkpoint import (
    Checkpoint,
    locate,
    read_checkpoint,
    read_optional_json,
    with_local_models,
)
from ddtree_appliance.config import Config
from ddtree_appliance.errors import HostError
from ddtree_appliance.rehearsal.server import DRAFTER, TARGET
from tests.unit.model_folders import WEIGHTS, header_of, in_hub_cache, make_checkpoint, safetensors, split_in_shards
from tests.unit.nobody import as_nobody

REVISION = "0123456789abcdef0123456789abcdef01234567"
NO_TOKENIZER = "it holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json, tiktoken.model)"
INDEX = "model.safetensors.index.json"


def me() -> str:
    return f"(as user {os.geteuid()})"


def problems_in(folder: Path, needs_tokenizer: bool = True) -> list[str]:
    with pytest.raises(HostError) as caught:
        read_checkpoint(folder, needs_tokenizer)
    prefix = f"{folder} is no complete checkpoint: "
    assert caught.value.message.startswith(prefix)
    assert caught.value.hint
    return caught.value.message.removeprefix(prefix).split("; ")


# Complete checkpoints


def test_floats_are_counted_by_element_and_the_rest_by_byte(tmp_path: Path) -> None:
    tensors = {
        "half": ("BF16", [3, 5]),
        "single": ("F32", [7]),
        "double": ("F64", [2]),
        "fp8": ("F8_E4M3", [11]),
        "packed": ("I32", [13]),
        "scalar": ("F16", []),
        "none": ("BF16", [0, 4]),
    }
    found = read_checkpoint(make_checkpoint(tmp_path / "model", tensors=tensors), True)
    assert (found.float_elements, found.other_bytes) == (15 + 7 + 2 + 1, 11 + 4 * 13)
    assert found.weight_bytes(2) == 25 * 2 + 63
    assert found.weight_bytes(4) == 25 * 4 + 63


def test_a_float32_checkpoint_is_half_as_large_in_bfloat16(tmp_path: Path) -> None:
    found = read_checkpoint(make_checkpoint(tmp_path / "model", tensors={"w": ("F32", [1000])}), True)
    assert (found.weight_bytes(2), found.weight_bytes(4)) == (2000, 4000)


@pytest.mark.parametrize("folder,needs_tokenizer", [(TARGET, True), (DRAFTER, False)])
def test_the_bundled_pair_is_as_large_as_its_library_says(folder: Path, needs_tokenizer: bool) -> None:
    from safetensors import safe_open

    found = read_checkpoint(folder, needs_tokenizer)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]
    assert found.other_bytes == 0
    assert found.float_elements == sum(math.prod(shape) for shape in shapes)
    assert found.config == json.loads((folder / "config.json").read_text())


def test_the_sum_is_over_all_shards_that_the_index_names(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    split_in_shards(folder, 3)
    (folder / "consolidated.safetensors").write_bytes(safetensors({"twice": ("BF16", [1 << 10])}))
    assert read_checkpoint(folder, True).float_elements == 3 * 4


def test_without_an_index_every_file_counts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "more.safetensors").write_bytes(safetensors({"more": ("BF16", [5])}))
    assert read_checkpoint(folder, True).float_elements == 8 + 128 + 5


def test_a_drafter_needs_no_tokenizer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", tokenizer=False)
    read_checkpoint(folder, needs_tokenizer=False)
    assert problems_in(folder) == [NO_TOKENIZER]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model"])
def test_any_of_the_known_tokenizers_is_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", tokenizer=False)
    (folder / name).write_text("{}")
    read_checkpoint(folder, True)


# Broken checkpoints. Each entry breaks a sound folder; the list is what must be said, and nothing else.


def put(name: str, content: bytes) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return broken


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def dangle(name: str) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../../blobs/gone")

    return broken


def replace_by_folder(name: str) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return broken


def replace_by_pipe(name: str) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return broken


def with_index(content: Any) -> Callable[[Path], None]:
    return put(INDEX, json.dumps(content).encode())


def lose_shards(folder: Path) -> None:
    names = split_in_shards(folder, 4)
    (folder / names[1]).unlink()
    dangle(names[3])(folder)


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


SOUND = safetensors(WEIGHTS)
SIZE = len(SOUND)
(LENGTH,) = struct.unpack("<Q", SOUND[:8])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
CUT = "model.safetensors is cut short"
NO_HEADER = "model.safetensors has no readable header"


def with_length(length: int) -> bytes:
    return struct.pack("<Q", length) + SOUND[8:]


def with_header(header: Any, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "broken,expected",
    [
        # config.json
        (remove("config.json"), ["config.json is missing"]),
        (dangle("config.json"), ["config.json is a dangling link"]),
        (replace_by_folder("config.json"), [f"config.json: is no regular file {me()}"]),
        (replace_by_pipe("config.json"), [f"config.json: is no regular file {me()}"]),
        (put("config.json", b"[1, 2]"), ["config.json holds no object"]),
        (put("config.json", b"null"), ["config.json holds no object"]),
        (put("config.json", b""), ["config.json is no JSON (Expecting value: line 1 column 1 (char 0))"]),
        (put("config.json", b"{"), [None]),
        (put("config.json", b"\xff\xfe\x00"), [None]),
        (put("config.json", b"[" * 200_000), [None]),
        (put("config.json", POINTER), ["config.json is no JSON (Expecting value: line 1 column 1 (char 0))"]),
        # tokenizer
        (remove("tokenizer.json"), [NO_TOKENIZER]),
        (dangle("tokenizer.json"), ["tokenizer.json is a dangling link"]),
        # files beside them, as an interrupted download leaves them
        (dangle("generation_config.json"), ["generation_config.json is a dangling link"]),
        # weights
        (remove("model.safetensors"), ["it holds no *.safetensors weights"]),
        (only_bin, ["it holds no *.safetensors weights, only pytorch_model.bin"]),
        (dangle("model.safetensors"), ["model.safetensors is a dangling link"]),
        (replace_by_folder("model.safetensors"), [f"model.safetensors: is no regular file {me()}"]),
        (replace_by_pipe("model.safetensors"), [f"model.safetensors: is no regular file {me()}"]),
        (put("model.safetensors", b""), [CUT]),
        (put("model.safetensors", SOUND[:7]), [CUT]),
        (put("model.safetensors", SOUND[:8]), [CUT]),
        (put("model.safetensors", SOUND[: 8 + LENGTH - 1]), [CUT]),
        (
            put("model.safetensors", SOUND[:-1]),
            [f"model.safetensors has {SIZE - 1} bytes, its header says {SIZE}"],
        ),
        (
            put("model.safetensors", SOUND + b"\n"),
            [f"model.safetensors has {SIZE + 1} bytes, its header says {SIZE}"],
        ),
        (put("model.safetensors", bytes(SIZE)), [CUT]),
        (put("model.safetensors", POINTER), ["model.safetensors is a git-lfs pointer, not the file"]),
        (put("model.safetensors", with_length(0)), [CUT]),
        (put("model.safetensors", with_length((1 << 64) - 1)), [CUT]),
        (put("model.safetensors", with_length(LENGTH - 1)), [NO_HEADER]),
        (put("model.safetensors", with_header(b"\xff" * 40)), [NO_HEADER]),
        (put("model.safetensors", with_header(b"[" * 200_000)), [NO_HEADER]),
        (put("model.safetensors", with_header([])), [NO_HEADER]),
        (put("model.safetensors", with_header({"w": 1})), [NO_HEADER]),
        (put("model.safetensors", with_header({"w": {}})), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(dtype="BF17"), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(dtype=["BF16"]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(dtype=None), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(shape=4), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(shape=[-2, -2]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(shape=["4"]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(shape=[4.0]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(shape=[True, 4]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(shape=[5]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(data_offsets=[-8, 0]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(data_offsets=[8, 0]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(data_offsets=[0]), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(data_offsets=None), 8)), [NO_HEADER]),
        (put("model.safetensors", with_header(tensor(data_offsets=[4, 12]), 12)), [NO_HEADER]),
        (put("model.safetensors", with_header({**tensor(), "v": tensor()["w"]}, 8)), [NO_HEADER]),
        # several files
        (
            lose_shards,
            [
                "model-00004-of-00004.safetensors is a dangling link",
                "model-00002-of-00004.safetensors is missing",
            ],
        ),
        (dangle(INDEX), [f"{INDEX} is a dangling link"]),
        (put(INDEX, b"{"), [None]),
        (with_index([]), [f"{INDEX} holds no object"]),
        (with_index({}), [f"{INDEX} has no weight_map from tensors to files"]),
        (with_index({"weight_map": ["model.safetensors"]}), [f"{INDEX} has no weight_map from tensors to files"]),
        (with_index({"weight_map": {"w": ["x"]}}), [f"{INDEX} has no weight_map from tensors to files"]),
        (with_index({"weight_map": {}}), ["it holds no *.safetensors weights"]),
        (with_index({"weight_map": {"w": "../secret.safetensors"}}), ["../secret.safetensors is missing"]),
        (with_index({"weight_map": {"w": "/etc/passwd"}}), ["/etc/passwd is missing"]),
        (with_index({"weight_map": {"w": ""}}), [" is missing"]),
    ],
)
def test_what_is_broken_is_said(broken: Callable[[Path], None], expected: list[str | None], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (tmp_path / "secret.safetensors").write_bytes(SOUND)
    broken(folder)
    found = problems_in(folder)
    assert len(found) == len(expected)
    for said, wanted in zip(found, expected, strict=True):
        assert said == wanted if wanted is not None else " is no JSON (" in said


def test_an_empty_folder_lacks_everything(tmp_path: Path) -> None:
    assert problems_in(tmp_path) == ["config.json is missing", NO_TOKENIZER, "it holds no *.safetensors weights"]


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    names = split_in_shards(folder, 5)
    (folder / "config.json").write_text("[]")
    (folder / "tokenizer.json").unlink()
    (folder / names[0]).unlink()
    dangle(names[1])(folder)
    (folder / names[2]).write_bytes(POINTER)
    (folder / names[3]).write_bytes(SOUND[:-3])
    assert problems_in(folder) == [
        f"{names[1]} is a dangling link",
        "config.json holds no object",
        NO_TOKENIZER,
        f"{names[0]} is missing",
        f"{names[2]} is a git-lfs pointer, not the file",
        f"{names[3]} has {SIZE - 3} bytes, its header says {SIZE}",
    ]


@pytest.mark.parametrize("path,why", [("nowhere", "No such file or directory"), ("file", "Not a directory")])
def test_what_is_no_folder_is_no_checkpoint(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HostError) as caught:
        read_checkpoint(tmp_path / path, True)
    assert caught.value.message == f"{tmp_path / path} cannot be read as a folder: {why} {me()}"


@pytest.mark.parametrize("closed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_files_that_this_user_cannot_read_are_named(closed: str) -> None:
    def prepare(folder: Path) -> Path:
        made = make_checkpoint(folder / "model")
        (made / closed).chmod(0)
        return made

    with as_nobody(prepare) as folder:
        assert problems_in(folder) == [f"{closed}: Permission denied {me()}"]


def test_a_closed_folder_on_the_way_is_said_so() -> None:
    def prepare(folder: Path) -> Path:
        made = make_checkpoint(folder / "closed" / "model")
        (folder / "closed").chmod(0)
        return made

    with as_nobody(prepare) as folder:
        with pytest.raises(HostError) as caught:
            locate(str(folder), None, None)
        assert caught.value.message == f"{folder}: Permission denied {me()}"


def test_blobs_that_are_closed_are_no_dangling_links() -> None:
    def prepare(folder: Path) -> Path:
        snapshot = in_hub_cache(folder / "hub", "org/name", REVISION, make_checkpoint(folder / "source"))
        (folder / "hub" / "models--org--name" / "blobs").chmod(0)
        return snapshot

    with as_nobody(prepare) as snapshot:
        names = ("config.json", "tokenizer.json", "model.safetensors")
        assert problems_in(snapshot) == [f"{name}: Permission denied {me()}" for name in names]


# Hostile files


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
COUNTS = st.integers(0, 16) | st.integers() | JSON_VALUES
TENSORS = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    JSON_VALUES
    | st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["BF16", "F32", "F8_E4M3", "F4", "I64", "X"]) | JSON_VALUES,
            "shape": st.lists(COUNTS, max_size=3) | JSON_VALUES,
            "data_offsets": st.lists(COUNTS, max_size=3) | JSON_VALUES,
        },
    ),
    max_size=3,
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def refuses_or_reads(folder: Path) -> Checkpoint | None:
    try:
        return read_checkpoint(folder, True)
    except HostError:
        return None


def is_sound(path: Path) -> bool:
    """What safetensors itself says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return True
    except SafetensorError:
        return False


@QUICK
@given(content=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_host_error(content: bytes, sound: Path) -> None:
    for name in ("model.safetensors", "config.json", INDEX):
        before = (sound / name).read_bytes() if (sound / name).exists() else None
        (sound / name).write_bytes(content)
        refuses_or_reads(sound)
        (sound / name).unlink() if before is None else (sound / name).write_bytes(before)


@QUICK
@given(header=TENSORS | JSON_VALUES, data=st.integers(0, 40))
def test_no_header_raises_anything_but_a_host_error(header: Any, data: int, sound: Path) -> None:
    (sound / "model.safetensors").write_bytes(with_header(header, data))
    assert refuses_or_reads(sound) is None or is_sound(sound / "model.safetensors")


@QUICK
@given(value=JSON_VALUES, index=JSON_VALUES | st.fixed_dictionaries({"weight_map": JSON_VALUES}))
def test_no_json_raises_anything_but_a_host_error(value: Any, index: Any, sound: Path) -> None:
    (sound / "config.json").write_text(json.dumps(value))
    (sound / INDEX).write_text(json.dumps(index))
    refuses_or_reads(sound)


SOUND_TENSORS = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.sampled_from(["BF16", "F32", "F8_E4M3", "I32", "F64"]), st.lists(st.integers(0, 3), max_size=3)),
    max_size=4,
)
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.sampled_from(["shape", "data_offsets"]), st.integers(0, 1), st.integers(0, 9)
    ),
    max_size=2,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=SOUND_TENSORS, mutations=MUTATIONS, more=st.sampled_from([0, 0, 0, 1, -1]))
def test_a_file_is_sound_exactly_if_safetensors_says_so(
    tensors: dict[str, tuple[str, list[int]]], mutations: list[tuple[str, str, int, int]], more: int, sound: Path
) -> None:
    header = header_of(tensors)
    data = max((entry["data_offsets"][1] for name, entry in header.items() if name in tensors), default=0)
    for name, field, place, value in mutations:
        if name in tensors and place < len(header[name][field]):
            header[name][field][place] = value
    path = sound / "model.safetensors"
    path.write_bytes(with_header(header, max(data + more, 0)))
    assert (refuses_or_reads(sound) is not None) == is_sound(path)


# Where models are


def pair_config(**engine: Any) -> Config:
    paths = {"models": engine.pop("models", "/srv/models")}
    return Config.model_validate({"engine": engine, "paths": paths})


@pytest.mark.parametrize("layout", ["hub", "."])
def test_a_hub_name_is_its_snapshot_at_the_revision(layout: str, tmp_path: Path) -> None:
    snapshot = in_hub_cache(tmp_path / "cache" / layout, "org/name", REVISION, make_checkpoint(tmp_path / "source"))
    found = locate("org/name", REVISION, str(tmp_path / "cache"))
    assert found.samefile(snapshot)
    assert read_checkpoint(found, True).float_elements == 8 + 128


def test_another_revision_is_not_taken_instead(tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hub", "org/name", REVISION, make_checkpoint(tmp_path / "source"))
    other = REVISION[::-1]
    with pytest.raises(HostError) as caught:
        locate("org/name", other, str(tmp_path))
    assert caught.value.message == (
        f"org/name at {other} is not in the hub cache below {tmp_path} "
        f"({tmp_path}/hub/models--org--name/snapshots/{other} does not exist)"
    )
    assert caught.value.hint == f"HF_HOME={tmp_path} hf download org/name --revision {other}"


@pytest.mark.parametrize("revision,models", [(None, "/srv/models"), (REVISION, None)])
def test_a_hub_name_needs_a_cache_and_a_revision(revision: str | None, models: str | None) -> None:
    with pytest.raises(HostError, match=r"it needs paths\.models and a revision"):
        locate("org/name", revision, models)


def test_an_interrupted_download_is_named_file_by_file(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    names = split_in_shards(source, 3)
    snapshot = in_hub_cache(tmp_path / "hub", "org/name", REVISION, source)
    for name in names[1:]:
        (snapshot / name).resolve().rename(tmp_path / "moved")
    found = problems_in(locate("org/name", REVISION, str(tmp_path)))
    assert found == [f"{name} is a dangling link" for name in names[1:]]


def test_a_link_that_leads_to_itself_dangles(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    assert problems_in(folder) == ["model.safetensors is a dangling link"]


def test_the_bundled_pair_is_in_the_package() -> None:
    assert locate("bundled:target", None, None).samefile(TARGET)
    assert locate("bundled:drafter", None, None).samefile(DRAFTER)


def test_both_models_become_local_folders(tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hub", "org/drafter", REVISION, make_checkpoint(tmp_path / "source"))
    target = make_checkpoint(tmp_path / "target")
    config = pair_config(
        model=str(target), drafter="org/drafter", drafter_revision=REVISION, models=str(tmp_path), served_model_name="n"
    )
    local = with_local_models(config)
    assert local.engine.model == str(target)
    assert local.engine.drafter == str(tmp_path / "hub" / "models--org--drafter" / "snapshots" / REVISION)
    assert local.engine.served_model_name == "n"
    assert config.engine.drafter == "org/drafter"


def test_both_missing_models_are_named(tmp_path: Path) -> None:
    config = pair_config(model=f"{tmp_path}/a", drafter="org/drafter", drafter_revision=REVISION, models=str(tmp_path))
    with pytest.raises(HostError) as caught:
        with_local_models(config)
    assert caught.value.message.startswith(
        f"{tmp_path}/a does not exist on this host; org/drafter at {REVISION} is not"
    )
    assert "hf download org/drafter" in (caught.value.hint or "")


def test_an_optional_file_may_be_missing_but_not_broken(tmp_path: Path) -> None:
    assert read_optional_json(tmp_path / "x.json") == {}
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_optional_json(tmp_path / "x.json") == {"a": 1}
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(HostError, match=r"x\.json is no JSON"):
        read_optional_json(tmp_path / "x.json")
