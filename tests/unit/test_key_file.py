"""Keys on their way from podman's secrets to SGLang: to memory only, for this user only, and into no message."""

from __future__ import annotations

import os
import stat
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_appliance import key_file
from ddtree_appliance.config import Config
from ddtree_appliance.errors import HostError
from ddtree_appliance.key_file import MAX_LENGTH, MIN_LENGTH, SECRETS, read_key, read_keys, write_key_file
from tests.unit.engine import import_sglang
from tests.unit.nobody import as_nobody

KEY = "Zm9yIHRlc3RzIG9ubHkgLSAzMiBieXRlcyBsb25nIQ=="
ADMIN_KEY = "another-key-for-the-admin"
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EXOTIC = [
    "yes0123456789012",
    "0123456789012345",
    "0x23456789012345",
    "1e10000000000000",
    "12:30:45:12:30:45",
    "2026-11-29T12:00:00Z",
    "null~~~~~~~~~~~~",
    "true#not-a-comment",
    "#starts-as-comment",
    "a:colon:everywhere",
    "key:value-mapping",
    "'single'quotes'''",
    '"double"quotes"""',
    "back\\slash\\n\\x41\\u0041",
    "%percent%d%s{0}${x}",
    "[list,of,things]",
    "{flow: no}".replace(" ", "") + "mapping",
    "&anchor*alias!tag",
    "|literal-or->fold",
    "@at`backtick`tail",
    "?question,comma..",
    "<<merge<<merge<<<",
    "ends-with-a-colon:",
    "=equals=equals===",
    "---document-start"[3:] + "---",
    "".join(chr(code) for code in range(33, 127) if chr(code) != "-") + "-",
]


def configured(api: str | None = "ddtree-api-key", admin: str | None = None) -> Config:
    engine = {"model": "/srv/models/target", "drafter": "/srv/models/drafter"}
    return Config.model_validate({"engine": engine, "server": {"api_key_secret": api, "admin_key_secret": admin}})


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "ddtree-api-key").write_text(f"{KEY}\n")
    (folder / "ddtree-admin-key").write_text(f"{ADMIN_KEY}\n")
    return folder


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of this user's on a real tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm is not writable")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


# Reading


@pytest.mark.parametrize("key", EXOTIC)
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_any_printable_word_is_a_key_whatever_ends_its_line(key: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(f"{key}{end}".encode())
    assert read_key(tmp_path / "key") == key


@pytest.mark.parametrize("length", [MIN_LENGTH, MAX_LENGTH])
def test_the_shortest_and_the_longest_key_are_taken(length: int, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * length)
    assert read_key(tmp_path / "key") == "k" * length


UNSENDABLE = "holds blanks, several lines or a leading dash: no HTTP client could send it"


@pytest.mark.parametrize(
    "content,message",
    [
        (b"", "has 0 characters; a key has 16 to 512"),
        (b"\n\r\n", "has 0 characters; a key has 16 to 512"),
        (b"k" * 15, "has 15 characters; a key has 16 to 512"),
        (b"k" * 513, "has 513 characters; a key has 16 to 512"),
        (b"first-key-is-here\nsecond-key-is-here\n", UNSENDABLE),
        (b"first-key-is-here\r\nsecond-key-is-here", UNSENDABLE),
        (b" leading-blank-here", UNSENDABLE),
        (b"trailing-blank-here \n", UNSENDABLE),
        (b"a blank in between", UNSENDABLE),
        (b"a\ttab-in-between-it", UNSENDABLE),
        (b"a-null\x00-in-between-it", UNSENDABLE),
        (b"an-escape\x1b[31m-in-it", UNSENDABLE),
        (b"a-delete\x7f-in-between", UNSENDABLE),
        (b"-leading-dash-is-a-flag", UNSENDABLE),
        (b"--api-key=other-key-here", UNSENDABLE),
        ("schlüssel-mit-umlaut".encode(), "is not ASCII text"),
        (b"\xff\xfe\x00binary-secret-123", "is not ASCII text"),
    ],
)
def test_what_is_no_key_is_refused_without_showing_it(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ddtree-api-key"
    path.write_bytes(content)
    with pytest.raises(HostError) as caught:
        read_key(path)
    assert caught.value.message == f"the secret {path} {message}"
    assert caught.value.hint
    assert caught.value.__cause__ is None  # a decoding error shows the bytes


@pytest.mark.parametrize("make,why", [(None, "No such file or directory"), (Path.mkdir, "Is a directory")])
def test_a_secret_that_cannot_be_read_is_named(make: object, why: str, tmp_path: Path) -> None:
    path = tmp_path / "ddtree-api-key"
    if callable(make):
        make(path)
    with pytest.raises(HostError) as caught:
        read_key(path)
    assert caught.value.message == f"the secret {path} cannot be read: {why}"
    assert "podman secret create ddtree-api-key -" in (caught.value.hint or "")


def test_a_secret_of_another_user_is_said_to_be_closed() -> None:
    def prepare(folder: Path) -> Path:
        (folder / "key").write_text(KEY)
        (folder / "key").chmod(0)
        return folder / "key"

    with as_nobody(prepare) as path, pytest.raises(HostError, match="Permission denied"):
        read_key(path)


@QUICK
@given(content=st.binary(min_size=3, max_size=600))
def test_no_message_holds_the_content_of_a_secret(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    try:
        key = read_key(path)
    except HostError as error:
        said = f"{error.message} {error.hint} {error!r} {error.__cause__!r}".replace(str(path), "")
        for text in (content.decode("latin-1"), content.decode(errors="ignore")):
            # A short secret may be a part of the message's own words ("key").
            assert len(text) < 8 or text not in said
    else:
        assert key == content.decode().strip("\r\n")


def test_all_unusable_secrets_are_named_at_once(secrets: Path) -> None:
    (secrets / "ddtree-api-key").write_text("short")
    (secrets / "ddtree-admin-key").unlink()
    with pytest.raises(HostError) as caught:
        read_keys(configured(admin="other"), secrets)
    assert caught.value.message == (
        f"the secret {secrets}/ddtree-api-key has 5 characters; a key has 16 to 512; "
        f"the secret {secrets}/ddtree-admin-key cannot be read: No such file or directory"
    )


def test_one_key_for_users_and_admins_is_refused(secrets: Path) -> None:
    (secrets / "ddtree-admin-key").write_text(KEY)
    with pytest.raises(HostError) as caught:
        read_keys(configured(admin="other"), secrets)
    assert caught.value.message == "both secrets hold the same key: every user could manage the engine"
    assert KEY not in str(caught.value.hint)


@pytest.mark.parametrize(
    "api,admin,names",
    [
        ("x", "y", {"api-key": KEY, "admin-api-key": ADMIN_KEY}),
        ("x", None, {"api-key": KEY}),
        (None, "y", {"admin-api-key": ADMIN_KEY}),
        (None, None, {}),
    ],
)
def test_only_configured_keys_are_read(
    api: str | None, admin: str | None, names: dict[str, str], secrets: Path
) -> None:
    assert read_keys(configured(api, admin), secrets) == names


# Writing


def test_the_file_is_this_users_alone_and_holds_the_keys(secrets: Path, memory: Path) -> None:
    target = memory / "made" / "keys.yaml"
    before = os.umask(0)  # the mode must not rest on it
    try:
        written = write_key_file(configured(admin="other"), secrets, target)
    finally:
        os.umask(before)
    assert written == target
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    assert target.stat().st_uid == os.geteuid()
    assert yaml.safe_load(target.read_text()) == {"api-key": KEY, "admin-api-key": ADMIN_KEY}


def test_without_keys_no_file_is_made(secrets: Path, memory: Path) -> None:
    assert write_key_file(configured(None), secrets, memory / "made" / "keys.yaml") is None
    assert not (memory / "made").exists()


def test_a_disk_is_no_place_for_a_key(secrets: Path, tmp_path: Path) -> None:
    kind = key_file._filesystem_of(tmp_path)
    if kind in ("tmpfs", "ramfs"):
        pytest.skip("the tests' folder is in memory here")
    target = tmp_path / "run" / "keys.yaml"
    with pytest.raises(HostError) as caught:
        write_key_file(configured(), secrets, target)
    assert caught.value.message == f"{target.parent} is on {kind}, not on a tmpfs: the key would reach a disk"
    assert caught.value.hint == "podman run --tmpfs /run/ddtree:mode=0700,U"
    assert list(target.parent.iterdir()) == []


def test_a_link_out_of_memory_is_seen_through(secrets: Path, memory: Path, tmp_path: Path) -> None:
    if key_file._filesystem_of(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("the tests' folder is in memory here")
    (memory / "run").symlink_to(tmp_path)
    with pytest.raises(HostError, match="not on a tmpfs"):
        write_key_file(configured(), secrets, memory / "run" / "keys.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secrets"]


def test_real_filesystems_are_told_apart(memory: Path, tmp_path: Path) -> None:
    assert key_file._filesystem_of(memory) == "tmpfs"
    assert key_file._filesystem_of(Path("/proc")) == "proc"
    assert key_file._filesystem_of(Path("/sys")) == "sysfs"


def test_a_planted_link_is_replaced_and_its_target_untouched(secrets: Path, memory: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = memory / "keys.yaml"
    target.symlink_to(victim)
    write_key_file(configured(), secrets, target)
    assert victim.read_text() == "precious"
    assert not target.is_symlink()
    assert yaml.safe_load(target.read_text()) == {"api-key": KEY}


def test_a_link_planted_at_the_last_moment_is_not_followed(
    secrets: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, target = tmp_path / "victim", memory / "keys.yaml"
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: target.symlink_to(victim))
    with pytest.raises(HostError) as caught:
        write_key_file(configured(), secrets, target)
    assert caught.value.message == f"{target} cannot be written: File exists"
    assert not victim.exists()


def test_the_file_of_an_earlier_start_is_replaced_mode_and_all(secrets: Path, memory: Path) -> None:
    target = memory / "keys.yaml"
    target.write_text("api-key: old")
    target.chmod(0o666)
    write_key_file(configured(), secrets, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert yaml.safe_load(target.read_text()) == {"api-key": KEY}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(mode: int, secrets: Path, memory: Path) -> None:
    memory.chmod(mode)
    with pytest.raises(HostError) as caught:
        write_key_file(configured(), secrets, memory / "keys.yaml")
    assert caught.value.message == f"{memory} is not this user's alone: others could replace the key file"
    assert list(memory.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
def test_a_folder_of_another_user_is_refused(secrets: Path, memory: Path) -> None:
    os.chown(memory, 65534, 65534)
    with pytest.raises(HostError, match="is not this user's alone"):
        write_key_file(configured(), secrets, memory / "keys.yaml")
    os.chown(memory, 0, 0)


def test_a_place_that_cannot_be_written_is_a_host_error(secrets: Path) -> None:
    with pytest.raises(HostError) as caught:
        write_key_file(configured(), secrets, Path("/proc/ddtree/keys.yaml"))
    assert caught.value.message.startswith("/proc/ddtree/keys.yaml cannot be written: ")
    assert KEY not in f"{caught.value.message} {caught.value.hint}"


# What SGLang makes of it


KEYS = st.text(string.digits + string.ascii_letters + string.punctuation, min_size=MIN_LENGTH, max_size=80).filter(
    lambda key: not key.startswith("-")
)


@QUICK
@given(key=KEYS)
def test_every_key_survives_yaml(key: str, secrets: Path, memory: Path) -> None:
    (secrets / "ddtree-api-key").write_text(key)
    written = write_key_file(configured(), secrets, memory / "keys.yaml")
    assert written is not None
    assert yaml.safe_load(written.read_text()) == {"api-key": key}


@pytest.mark.parametrize("key", EXOTIC)
def test_every_key_survives_sglangs_own_parser(key: str, secrets: Path, memory: Path) -> None:
    merger = import_sglang("sglang.srt.server_args_config_parser").ConfigArgumentMerger()
    (secrets / "ddtree-api-key").write_text(key)
    written = write_key_file(configured(admin="other"), secrets, memory / "keys.yaml")
    merged = merger.merge_config_with_args(["--port", "1", "--config", str(written)])
    assert merged == ["--api-key", key, "--admin-api-key", ADMIN_KEY, "--port", "1"]


def test_the_settings_are_sglangs() -> None:
    from ddtree_appliance.flag_table import flag_table

    assert set(SECRETS) <= set(flag_table())
