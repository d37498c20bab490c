"""From a configuration file to a valid `Config`, or to every error in it with its line, column and remedy."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ddtree_appliance.config import Config
from ddtree_appliance.config_rules import broken_rules
from ddtree_appliance.engine_args import key_for_flag
from ddtree_appliance.errors import UsageError
from ddtree_appliance.yaml_source import Document, Problem, dotted, parse, shown
from ddtree_appliance.yaml_source import Path as KeyPath

_TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}
_LIMITS = {
    "greater_than_equal": ("ge", "below the lowest value"),
    "greater_than": ("gt", "not above"),
    "less_than_equal": ("le", "above the highest value"),
    "less_than": ("lt", "not below"),
}


class ConfigError(UsageError):
    """A configuration that is refused. `problems`: all of them, in the file's order."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = sorted(problems, key=lambda problem: (problem.mark, problem.path, problem.message))
        lines = []
        for problem in self.problems:
            lines.append(f"{source}:{problem.mark.line}:{problem.mark.column}: {problem}")
            if problem.hint:
                lines.append(f"  hint: {problem.hint}")
        super().__init__("\n".join(lines))

    def as_json(self) -> list[dict[str, Any]]:
        """The problems as plain data."""
        return [
            {
                "file": self.source,
                "line": problem.mark.line,
                "column": problem.mark.column,
                "path": dotted(problem.path),
                "message": problem.message,
                "hint": problem.hint,
            }
            for problem in self.problems
        ]


def load_config(path: Path) -> Config:
    """The configuration in `path`. Raises ConfigError with every problem in it, UsageError if it cannot be read."""
    return config_from(read_source(path), str(path))


def read_source(path: Path) -> bytes:
    """The bytes of the configuration file `path`. Raises UsageError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name an existing, readable configuration file") from error


def config_from(raw: bytes, source: str) -> Config:
    """The configuration in the text `raw`; `source` names it in errors. Raises ConfigError."""
    document = parse(raw)
    problems = list(document.problems)
    if problems and () not in document.marks:
        raise ConfigError(source, problems)  # nothing could be read: that keys are missing would be noise
    unreadable = {problem.path for problem in problems}
    config, found = _validated(document)
    # A value that YAML misreads has been reported; what it would have meant is unknown.
    problems += [problem for problem in found if problem.path not in unreadable]
    if config is not None:
        invalid = {problem.path for problem in problems}
        problems += broken_rules(config, document, invalid)
    if problems or config is None:
        raise ConfigError(source, problems)
    return config


def _validated(document: Document) -> tuple[Config | None, list[Problem]]:
    # The rules across keys run even if some keys are invalid: on a copy in which those are left out.
    try:
        return Config.model_validate(document.data), []
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
    problems = [_problem(error, document) for error in errors]
    pruned = copy.deepcopy(document.data)
    for error in errors:
        _repair(pruned, error)
    try:
        return Config.model_validate(pruned), problems
    except ValidationError:
        return None, problems


def _repair(data: dict[str, Any], error: Mapping[str, Any]) -> None:
    section, *inner = error["loc"]
    key = inner[0] if inner else None
    if section == "engine" and key is None:
        data[section] = dict(_PLACEHOLDERS)
    elif not isinstance(key, str):
        data.pop(section, None)  # one bad element makes a list unusable for the rules
    else:
        data[section].pop(key, None)
        if section == "engine" and key in _PLACEHOLDERS:
            data[section][key] = _PLACEHOLDERS[key]


_PLACEHOLDERS = {"model": "/placeholder/target", "drafter": "/placeholder/drafter"}


def _problem(error: Mapping[str, Any], document: Document) -> Problem:
    path: KeyPath = tuple(error["loc"])
    kind, value, hint = error["type"], error.get("input"), _description(path)
    if kind == "extra_forbidden":
        return Problem(document.mark_of(path, key=True), path, "unknown key", _nearest_key(path))
    if kind == "missing":
        return Problem(document.mark_of(path[:-1], key=True), path, "is required", hint)
    if kind == "string_type" and type(value) in (int, float) and isinstance(path[-1], str):
        hint = "put it in quotes"
    return Problem(document.mark_of(path), path, _message(kind, value, error), hint)


def _message(kind: str, value: Any, error: Mapping[str, Any]) -> str:
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, is {shown(value)}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{shown(value)} is {words} {error['ctx'][name]}"
    if kind == "literal_error":
        return f"{shown(value)} is not one of {error['ctx']['expected'].replace(chr(39), '').replace(' or ', ', ')}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} is no commit: 40 hexadecimal digits in small letters"
    return f"{shown(value)} {str(error['msg']).removeprefix('Value error, ')}"


def _nearest_key(path: KeyPath) -> str:
    name = str(path[-1])[:80].lstrip("-").replace("-", "_")
    section = _section(path[:-1])
    known = list(section.model_fields) if section else []
    everywhere = _keys(Config)
    if name in known:
        return f"write {name}"
    if elsewhere := [key for key in everywhere if key.rpartition(".")[2] == name]:
        return f"did you mean {elsewhere[0]}? (check the indentation)"
    if (key := key_for_flag(name)) is not None:
        return f"it is a flag of SGLang: use {key}"
    # A key of another section must be nearer than one of this section.
    likeness = {key: difflib.SequenceMatcher(None, name, key).ratio() + 0.2 for key in known}
    for key in everywhere:
        likeness.setdefault(key, difflib.SequenceMatcher(None, name, key.rpartition(".")[2]).ratio())
    nearest = max(likeness, key=lambda key: likeness[key])
    if likeness[nearest] >= 0.8:
        return f"did you mean {nearest}?"
    return f"known here: {', '.join(known)}" if known else "remove it"


def _keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        if (inner := _model_of(info.annotation)) is not None:
            keys += _keys(inner, f"{prefix}{name}.")
    return keys


def _section(path: KeyPath) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    for step in path:
        info = section.model_fields.get(str(step)) if section else None
        section = _model_of(info.annotation) if info else None
    return section


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(_model_of, get_args(annotation))), None)
    return None


def _description(path: KeyPath) -> str | None:
    named = path
    while named and isinstance(named[-1], int):
        named = named[:-1]
    section = _section(named[:-1])
    info = section.model_fields.get(str(named[-1])) if section and named else None
    if info is None:
        return None
    if path == ("engine",):
        return "give engine.model and engine.drafter; config/appliance.yaml shows every key"
    inner = _model_of(info.annotation)
    return f"its keys are {', '.join(inner.model_fields)}" if inner else info.description
