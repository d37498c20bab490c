"""The files on the host that `install` owns: what it wrote, who changed it since, and writing several of them or none.

`installed.json` records the sha256 of everything written, so that a file that differs from its record was edited.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddtree_appliance import __version__
from ddtree_appliance.errors import ApplianceError

_FORMAT = 1


@dataclass(frozen=True)
class Record:
    """What an earlier install wrote.

    units: sha256 by file name. config: the configuration's sha256. resources: what it made podman use, by podman's own
    word for the kind.
    """

    units: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    resources: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record at `path`, an empty one if there is none. Raises ApplianceError for one that cannot be read."""
        content = read_plain(path)
        if content is None:
            return cls()
        try:
            data = json.loads(content)
            if data["format"] != _FORMAT or any("/" in name for name in data["units"]):
                raise ValueError(f"format {data['format']}")
            return cls(dict(data["units"]), str(data["config"]), dict(data["resources"]))
        except (ValueError, KeyError, TypeError) as error:
            hint = "move it away and install with --discard-edits"
            raise ApplianceError(f"{path} is no record that this version can read: {error!r}", hint) from error

    def content(self) -> bytes:
        """The record as `read` reads it."""
        data = {"format": _FORMAT, "version": __version__, **asdict(self)}
        return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Change:
    """A file's content before and after; None: there is no file."""

    path: Path
    old: bytes | None
    new: bytes | None

    @classmethod
    def of(cls, path: Path, new: bytes | None) -> Change:
        """From what is at `path` to `new`. Raises ApplianceError if something else than a plain file is there."""
        return cls(path, read_plain(path), new)

    def edited(self, recorded: str | None) -> bool:
        """Whether the change would destroy what somebody else wrote."""
        return self.old is not None and self.old != self.new and sha256(self.old) != recorded


def apply_changes(changes: Sequence[Change], finish: Callable[[], None], undone: Callable[[], object]) -> None:
    """Make all changes and call `finish`. If anything fails, undo them all and call `undone`.

    Raises ApplianceError, whose message says whether the previous files are back.
    """
    begun = []
    try:
        for change in changes:
            if change.new != change.old:
                begun.append(change)
                _put(change.path, change.new)
        finish()
    except BaseException as error:
        for change in reversed(begun):
            with contextlib.suppress(OSError):
                _put(change.path, change.old)
        undone()
        if not isinstance(error, (ApplianceError, OSError)):
            raise
        lost = [str(change.path) for change in begun if read_plain(change.path) != change.old]
        outcome = f"cannot be restored: {', '.join(lost)}" if lost else "the previous files are back"
        if isinstance(error, ApplianceError):
            raise type(error)(f"{error.message}; {outcome}", error.hint) from error
        raise ApplianceError(f"{error}; {outcome}") from error


def _put(path: Path, content: bytes | None) -> None:
    if content is not None:
        for parent in reversed([parent for parent in path.parents if not parent.exists()]):
            parent.mkdir()
            parent.chmod(0o755)  # whatever the umask: the container's user reads below it
        write_file(path, content)
    elif path.exists():
        path.unlink()
        _sync(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, readable for everybody, at once and for good: also if the power fails."""
    # The name ends so that podman's generator does not take it for a unit.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_plain(path: Path) -> bytes | None:
    """The content of the file at `path`, None if there is none. Raises ApplianceError for a link or a folder."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        # A link to outside /etc/ddtree would dangle in the container, and replacing one would hide what it points at.
        raise ApplianceError(f"{path} is not a plain file", "move it away")
    return path.read_bytes() if path.exists() else None


def diff(path: Path, new: bytes | None) -> str:
    """The change from the file at `path`, which may be missing, to `new`, as a unified diff."""
    old = path.read_bytes() if path.is_file() else b""
    before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (old, new or b""))
    return "".join(difflib.unified_diff(before, after, str(path), f"{path} (rendered)"))


def sha256(content: bytes) -> str:
    """The hash that a record holds."""
    return hashlib.sha256(content).hexdigest()
