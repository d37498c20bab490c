"""A benchmark's folder: its plan, and append-only records of sessions and whole units.

A unit is one line, written in one go and forced to the disk: a command that is killed leaves no half of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.records import SessionRecord, UnitRecord
from ddtree_appliance.errors import ApplianceError, UsageError

Record = TypeVar("Record", bound=BaseModel)


class Store:
    """The folder `path`; made when the plan is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.step_times = path / "step-times"
        self._plan = path / "plan.json"
        self._sessions = path / "sessions.jsonl"
        self._units = path / "cells.jsonl"

    def has_plan(self) -> bool:
        """Whether a benchmark was begun here."""
        return self._plan.exists()

    def read_plan(self) -> Plan:
        """The plan. Raises UsageError if there is none, ApplianceError if it cannot be read."""
        if not self.has_plan():
            raise UsageError(f"{self.path} holds no benchmark", "ddtree-appliance bench run --out DIR makes one")
        return _parse(Plan, self._plan.read_bytes(), str(self._plan))

    def write_plan(self, plan: Plan) -> None:
        """Begin a benchmark here. Raises UsageError if the folder holds other files."""
        if self.path.exists() and any(self.path.iterdir()):
            raise UsageError(f"{self.path} is not empty and holds no benchmark", "use another --out folder")
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self._plan, plan.model_dump_json(indent=2) + "\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a second command that measures into the same folder. Raises UsageError."""
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another bench run is measuring into {self.path}") from None
            yield

    def sessions(self) -> list[SessionRecord]:
        """All sessions, oldest first."""
        return _read_lines(SessionRecord, self._sessions)

    def units(self) -> list[UnitRecord]:
        """All complete units, oldest first."""
        return _read_lines(UnitRecord, self._units)

    def missing_units(self, plan: Plan) -> list[tuple[int, int]]:
        """(group, concurrency) of every unit that is not stored, in the order in which they are measured."""
        stored = {(unit.group, unit.concurrency) for unit in self.units()}
        wanted = [(group, concurrency) for group in range(len(plan.groups())) for concurrency in plan.concurrency]
        return [unit for unit in wanted if unit not in stored]

    def add_session(self, session: SessionRecord) -> None:
        """Append a session."""
        _append_line(self._sessions, session)

    def add_unit(self, unit: UnitRecord) -> None:
        """Append a complete unit."""
        _append_line(self._units, unit)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def _append_line(path: Path, record: BaseModel) -> None:
    with path.open("ab") as file:
        file.truncate(len(_whole_lines(path)))
        file.write(record.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(path: Path) -> bytes:
    # What follows the last newline was being written when its command was killed.
    content = path.read_bytes() if path.exists() else b""
    whole, newline, _ = content.rpartition(b"\n")
    return whole + newline


def _read_lines(kind: type[Record], path: Path) -> list[Record]:
    lines = _whole_lines(path).splitlines()
    return [_parse(kind, line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _parse(kind: type[Record], content: bytes, where: str) -> Record:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ApplianceError(
            f"{where}: {place}: {first['msg']}", "was it written by another version, or edited?"
        ) from error
