"""What is put to the proof: addresses, keys and the time allowed, checked before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ddtree_appliance.errors import UsageError

DEFAULT_DEADLINE_S = 60.0
REDACTED = "[redacted]"


@dataclass(frozen=True)
class SmokeTarget:
    """A running service.

    engine_url and health_url (the sidecar's, None if there is none) are base addresses such as http://HOST:30000.
    api_key and admin_key are the service's own, None if it has none; they never show in this object's repr.
    deadline_s bounds the whole run. Raises UsageError for an address or a key that cannot be used.
    """

    engine_url: str
    health_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    deadline_s: float = DEFAULT_DEADLINE_S

    def __post_init__(self) -> None:
        for name, url in (("the engine's URL", self.engine_url), ("the sidecar's URL", self.health_url)):
            if url is not None:
                _check_url(name, url)
        for name, key in (("API key", self.api_key), ("admin key", self.admin_key)):
            # requests and http.client quote a header that they refuse; so a key never reaches them unchecked.
            if key is not None and not (key and all("!" <= letter <= "~" for letter in key)):
                raise UsageError(
                    f"the {name} is empty or has characters that cannot stand in an HTTP header",
                    "printable ASCII without spaces; does the key's file end with more than a newline?",
                )
        if not 0 < self.deadline_s < float("inf"):
            raise UsageError(f"the time limit must be a positive number of seconds, not {self.deadline_s}")

    def secrets(self) -> Iterator[tuple[str, str]]:
        """(name, value) of each key that was given."""
        if self.api_key is not None:
            yield "API key", self.api_key
        if self.admin_key is not None:
            yield "admin key", self.admin_key

    def redact(self, text: str) -> str:
        """`text` without the keys: a service may send them back in any answer that we quote."""
        spellings = [spelling for _, key in self.secrets() for spelling in spellings_of(key)]
        # The longest first: one key may be part of another.
        for spelling in sorted(spellings, key=len, reverse=True):
            text = text.replace(spelling, REDACTED)
        return text


def spellings_of(key: str) -> set[str]:
    """How `key` may stand in a body: as it is, or escaped in JSON."""
    escaped = json.dumps(key)[1:-1]
    return {key, escaped, escaped.replace("/", "\\/")}


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        is_complete = False
    if not is_complete:
        raise UsageError(f"{name} is not an http:// or https:// address", "for example http://127.0.0.1:30000")
    if parts.username is not None or parts.query or parts.fragment:
        # The address is printed, so nothing secret may stand in it; that is also why it is not quoted here.
        raise UsageError(
            f"{name} carries a user, a query or a fragment", "give host and port only; keys have own options"
        )
