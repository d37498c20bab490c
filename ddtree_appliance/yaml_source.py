"""Strict YAML: every value knows its line, and what YAML 1.1 would silently misread is refused.

PyYAML alone keeps the last of two equal keys and reads `no` as false, `010` as 8 and `12:30:45` as 45045. Here each of
these is a problem at its place, and all problems of a file are reported together.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
MAX_DEPTH = 32
MAX_BYTES = 1 << 18
_SHOWN_LENGTH = 80

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]{1,3})?")
# What a YAML 1.1 parser would turn into something else than the text that stands there: what it is, what to do.
_SURPRISES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"(y|n|yes|no|on|off)", re.I), "is a truth value to some YAML readers", "write true or false, or {q}"),
    (re.compile(r"[-+]?0[0-9_]+"), "is an octal number to YAML", "drop the leading zero, or {q}"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "is a number to base 60 to YAML", "{q}"),
    (re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+)"), "is a number to another base", "write it in decimal"),
    (re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?"), "is a number with underscores", "leave them out, or {q}"),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?"), "is a date to YAML", "{q}"),
    (re.compile(r"[-+]?\.(inf|nan)", re.I), "is no finite number", "write a number, or {q}"),
    (re.compile(r"[-+]?[1-9][0-9]{19,}"), "is too large a number", "write a smaller one, or {q}"),
    (re.compile(r"="), "is a special value to YAML", "{q}"),
)
_UNCLOSED = "a quote is opened here and never closed"
# PyYAML's words for what is no YAML; our words, the remedy, and whether the place is where the unfinished part begins.
_SYNTAX: tuple[tuple[str, str, str, bool], ...] = (
    (r"character '\\t' that cannot", "a tab stands where only blanks can", "indent with blanks", False),
    (r"character '(.)' that cannot", "a value cannot begin with {0}", "put the text in quotes", False),
    (
        *("mapping values are not allowed", "a colon follows what cannot be a key"),
        *('check indentation and colon of the line above, and quote text that holds ": "', False),
    ),
    (
        *("expected <block end>", "this does not continue what stands above it"),
        *("check the indentation, and quotes that end too early", False),
    ),
    ("quoted scalar.* (end of stream|document separator)", _UNCLOSED, "close it", True),
    (
        *("double-quoted scalar", "a backslash is followed by what YAML does not know"),
        *("double the backslash, or use single quotes", False),
    ),
    (
        *("while parsing a flow (mapping|sequence)", "what is opened here goes wrong or is never closed"),
        *("separate with commas, and close each [ and {{", True),
    ),
    (
        "node content, but found '<stream end>'",
        "the file ends too early",
        "write the value, and close what is open",
        False,
    ),
    ("the node content, but found '(.+)'", "a value is missing before {0}", "write it, or quote the text", False),
    ("could not find expected ':'", "a key without a colon", "write KEY: VALUE", True),
    ("a block scalar", "what follows | or > is not understood", "begin the text in the next line, indented", False),
    ("sequence entries are not allowed", "a list cannot begin here", "put each - on a line of its own", False),
    (
        *("expected a single document", "a second document begins here"),
        *("remove what stands before or after it, and the line ---", False),
    ),
    (
        "YAML document|document start|directive",
        "directives are not supported",
        "remove the lines that begin with %",
        False,
    ),
)
# Line ends to YAML and to no editor: every line number below one would be wrong.
_ODD_LINE_END = re.compile("[\x85\u2028\u2029]|\r(?!\n)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_REMEDY = "write the character itself instead of its \\u escape"


@dataclass(frozen=True, order=True)
class Mark:
    """A place in the file; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file. `path` is the key's path, empty for the file as a whole."""

    mark: Mark
    path: Path
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


@dataclass
class Document:
    """A file's contents. `data` holds everything readable, even where `problems` names what was not.

    marks: the place of each value, by path; key_marks: the place of each mapping's keys.
    """

    data: dict[str, Any] = field(default_factory=dict)
    marks: dict[Path, Mark] = field(default_factory=dict)
    key_marks: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def mark_of(self, path: Path, key: bool = False) -> Mark:
        """The place of `path`, or of the nearest mapping that holds it. key: of its key rather than its value."""
        if key and path in self.key_marks:
            return self.key_marks[path]
        for length in range(len(path), -1, -1):
            known = self.key_marks if length < len(path) and path[:length] in self.key_marks else self.marks
            if path[:length] in known:
                return known[path[:length]]
        return Mark(1, 1)


def dotted(path: Path) -> str:
    """`("engine", "extra_args", 0)` as `engine.extra_args[0]`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{_key_shown(step)}" if text else _key_shown(step)
    return text


def _key_shown(key: str) -> str:
    is_plain = key and key.isprintable() and len(key) <= _SHOWN_LENGTH and not any(sign in key for sign in ' .[]"')
    return key if is_plain else shown(key)


def shown(value: Any) -> str:
    """`value` in a message: as it would stand in a file, on one line, shortened."""
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN_LENGTH else f"{value[: _SHOWN_LENGTH - 3]}..."
        return json.dumps(short, ensure_ascii=not short.isprintable())
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return "a list" if isinstance(value, (list, tuple)) else "keys and values"


def parse(raw: bytes) -> Document:
    """Read one YAML document whose root is a mapping. Never raises: what is wrong is in `problems`."""
    document = Document()
    text = _decoded(raw, document)
    if text is None:
        return document
    root = _composed(text, document)
    if isinstance(root, yaml.MappingNode):
        document.data = _mapping(root, (), document)
    elif root is not None:
        hint = "begin with engine:, as config/appliance.yaml does"
        document.problems.append(Problem(_mark(root.start_mark), (), "the file must hold keys and values", hint))
    return document


def _decoded(raw: bytes, document: Document) -> str | None:
    problem = None
    if len(raw) > MAX_BYTES:
        hint = "a configuration has a few thousand: is it the right file?"
        problem = Problem(Mark(1, 1), (), f"the file has {len(raw)} bytes; the limit is {MAX_BYTES}", hint)
    else:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            before = raw[: error.start].decode()
            mark = _place(before, len(before))
            problem = Problem(mark, (), "the file is not UTF-8 text", "save it as UTF-8")
        else:
            if (odd := _ODD_LINE_END.search(text)) is None:
                return text
            code = f"U+{ord(odd[0]):04X}"
            problem = Problem(
                _place(text, odd.start()), (), f"the character {code} ends a line to YAML only", "remove it"
            )
    document.problems.append(problem)
    return None


def _composed(text: str, document: Document) -> yaml.Node | None:
    try:
        loader = _StrictLoader(text)
    except yaml.reader.ReaderError as error:
        where = _place(text, error.position)
        message = f"the character U+{ord(text[error.position]):04X} may not occur"
        document.problems.append(Problem(where, (), message, "remove it"))
        return None
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error, text))
    except (ValueError, OverflowError):
        # PyYAML does not check the numbers in escapes and directives.
        where = _clamped(loader.get_mark(), text)
        document.problems.append(Problem(where, (), "no YAML: a number is out of range", "correct or remove it"))
    return None


class _StrictLoader(yaml.SafeLoader):
    # Composing recurses per level: a few thousand brackets would end in a RecursionError, a few aliases in gigabytes.
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def get_event(self) -> Any:
        event = super().get_event()  # type: ignore[no-untyped-call]
        refusal = None
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                refusal = f"values are nested more than {MAX_DEPTH} levels deep"
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._depth -= 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            refusal = "anchors and aliases are not supported"
        elif isinstance(event, yaml.DocumentStartEvent):
            refusal = "directives are not supported" if event.version or event.tags else None
        elif getattr(event, "tag", None):
            refusal = "tags are not supported"
        if refusal is not None:
            raise _Refusal(problem=refusal, problem_mark=event.start_mark)
        return event


class _Refusal(yaml.MarkedYAMLError):
    """YAML, but of a kind that is refused."""


_REMEDIES = {
    "anchors and aliases are not supported": "write the value out, or quote text that begins with & or *",
    "tags are not supported": "leave it out, or quote text that begins with !",
    "directives are not supported": "remove the lines that begin with %",
}


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    words = " ".join(filter(None, [error.context, error.problem]))
    at_problem = error.problem_mark or error.context_mark
    if isinstance(error, _Refusal):
        return Problem(_clamped(at_problem, text), (), words, _REMEDIES.get(words, "the configuration needs few"))
    for pattern, message, hint, at_opening in _SYNTAX:
        if (found := re.search(pattern, words, re.S)) is not None:
            mark = _clamped(error.context_mark or at_problem if at_opening else at_problem, text)
            return Problem(mark, (), f"no YAML: {message.format(*found.groups())}", hint.format(*found.groups()))
    hint = "compare the line with config/appliance.yaml"
    return Problem(_clamped(at_problem, text), (), f"no YAML: {words}", hint)


def _clamped(mark: Any, text: str) -> Mark:
    # Where the file ends too early, PyYAML points behind its last line.
    return _place(text, min(mark.index, len(text.rstrip("\n")))) if mark is not None else Mark(1, 1)


def _place(text: str, index: int) -> Mark:
    return Mark(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def _mark(mark: Any) -> Mark:
    return Mark(1, 1) if mark is None else Mark(mark.line + 1, mark.column + 1)


def _mapping(node: yaml.MappingNode, path: Path, document: Document) -> dict[str, Any]:
    document.marks[path] = _mark(node.start_mark)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = _mark(key_node.start_mark)
        problem = None
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode):
            problem = Problem(where, path, "a key must be text", "write KEY: VALUE")
        elif _SURROGATE.search(key):
            problem = Problem(where, path, "a key holds half a character", _SURROGATE_REMEDY)
        elif key == "<<" and key_node.style is None:
            problem = Problem(where, path, "merge keys are not supported", "write the keys out")
        elif key in result:
            first = document.key_marks[(*path, key)].line
            problem = Problem(where, (*path, key), f"stands twice, first in line {first}", "remove one of them")
        if problem is not None:
            document.problems.append(problem)
            continue
        document.key_marks[(*path, key)] = where
        result[key] = _value(value_node, (*path, key), document)
    return result


def _value(node: yaml.Node, path: Path, document: Document) -> Any:
    document.marks[path] = _mark(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, index), document) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, path, document)


def _scalar(node: yaml.ScalarNode, path: Path, document: Document) -> Any:
    text: str = node.value

    def refuse(message: str, hint: str) -> str:
        document.problems.append(Problem(document.marks[path], path, message, hint))
        return text

    if _SURROGATE.search(text):
        return refuse("holds half a character", _SURROGATE_REMEDY)
    if node.style is not None:  # quoted, or a block: text as it stands
        return text
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    for pattern, reason, remedy in _SURPRISES:
        if pattern.fullmatch(text):
            as_text = shown(text)
            return refuse(f"{as_text[1:-1]} {reason}", remedy.replace("{q}", f"quote the text: {as_text}"))
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else refuse(f"{text} is too large a number", "write a smaller one")
    return text
