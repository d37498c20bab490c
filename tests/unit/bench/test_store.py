"""The folder: only whole records count, one command at a time, and what is missing is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_appliance.bench.plan import make_plan
from ddtree_appliance.bench.store import Store
from ddtree_appliance.errors import ApplianceError, UsageError
from tests.unit.bench.made_records import session, unit

PLAN = make_plan({"model_path": "/t", "drafter": "/d", "variants": ["ddtree:budget=8"], "concurrency": (1, 2)})


def begun(folder: Path) -> Store:
    store = Store(folder / "out")
    store.write_plan(PLAN)
    return store


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = begun(tmp_path)
    assert store.read_plan() == PLAN
    assert (store.sessions(), store.units()) == ([], [])
    store.add_session(session(0))
    store.add_unit(unit(0, 2))
    store.add_unit(unit(0, 1))
    again = Store(store.path)
    assert again.sessions() == [session(0)]
    assert again.units() == [unit(0, 2), unit(0, 1)]


def test_a_unit_cut_in_half_leaves_no_unit_and_the_next_one_is_sound(tmp_path: Path) -> None:
    store = begun(tmp_path)
    store.add_unit(unit(0, 1))
    path = store.path / "cells.jsonl"
    whole = path.read_bytes()
    line = unit(0, 2).model_dump_json().encode()
    for cut in (1, len(line) // 2, len(line)):  # the last: all but its newline
        path.write_bytes(whole + line[:cut])
        assert store.units() == [unit(0, 1)]
        assert store.missing_units(PLAN) == [(0, 2)]
        store.add_unit(unit(1, 2))
        assert store.units() == [unit(0, 1), unit(1, 2)]


def test_missing_units_are_those_of_every_group_and_concurrency(tmp_path: Path) -> None:
    store = begun(tmp_path)
    assert store.missing_units(PLAN) == [(0, 1), (0, 2)]
    two_groups = make_plan(
        {"model_path": "/t", "drafter": "/d", "variants": ["ddtree:budget=8", "ddtree:budget=9"], "group_size": 3}
        | {"concurrency": (1, 2)}
    )
    store.add_unit(unit(0, 2, group=1))
    assert store.missing_units(two_groups) == [(0, 1), (0, 2), (1, 1)]


@pytest.mark.parametrize("bad", [b"{}\n", b"not json\n", b'{"schema_version": 2}\n'])
def test_a_file_of_another_kind_is_an_error_with_its_place(bad: bytes, tmp_path: Path) -> None:
    store = begun(tmp_path)
    (store.path / "cells.jsonl").write_bytes(unit(0, 1).model_dump_json().encode() + b"\n" + bad)
    with pytest.raises(ApplianceError, match=r"cells\.jsonl:2: "):
        store.units()
    (store.path / "plan.json").write_bytes(b'{"schema_version": 2}')
    with pytest.raises(ApplianceError, match=r"plan\.json: schema_version: "):
        store.read_plan()


def test_a_folder_without_a_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no benchmark"):
        Store(tmp_path / "none").read_plan()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not empty and holds no benchmark"):
        Store(tmp_path).write_plan(PLAN)


def test_two_commands_do_not_measure_into_one_folder(tmp_path: Path) -> None:
    store = begun(tmp_path)
    with store.locked(), pytest.raises(UsageError, match="another bench run"), Store(store.path).locked():
        raise AssertionError("both were let in")
    with store.locked():
        pass
