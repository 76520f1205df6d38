"""Sessions of browsers: a link that is valid once for a minute, then a cookie for twelve hours.

Both are in memory only, so that a restart ends them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

LINK_S = 60.0
SESSION_S = 12 * 3600.0
# The oldest of a user goes for one more, and the oldest of all.
MAX_OF_USER = 16
MAX_KEYS = 1024

C = TypeVar("C")


class _Entry(NamedTuple, Generic[C]):
    caller: C
    until: float


class Keys(Generic[C]):
    """Secrets that stand for a caller's rights for ``lasts_s``; only their digests are kept."""

    def __init__(self, lasts_s: float, monotonic: Callable[[], float]) -> None:
        self._lasts_s = lasts_s
        self._monotonic = monotonic
        self._entries: dict[bytes, _Entry[C]] = {}

    def issue(self, caller: C) -> str:
        """Return a new key with the rights of the caller."""
        now = self._monotonic()
        self._entries = {key: one for key, one in self._entries.items() if one.until > now}
        own = [key for key, one in self._entries.items() if one.caller == caller]
        if len(own) >= MAX_OF_USER or len(self._entries) >= MAX_KEYS:
            del self._entries[own[0] if len(own) >= MAX_OF_USER else next(iter(self._entries))]
        key = secrets.token_urlsafe(32)
        self._entries[_digest(key)] = _Entry(caller, now + self._lasts_s)
        return key

    def find(self, key: str) -> C | None:
        """Return the caller, None for a key that is unknown, used or expired."""
        entry = self._entries.get(_digest(key))
        return entry.caller if entry and entry.until > self._monotonic() else None

    def end(self, key: str) -> C | None:
        """Return the caller as ``find`` does, and forget the key."""
        caller = self.find(key)
        self._entries.pop(_digest(key), None)
        return caller


class Sessions(Generic[C]):
    """Links and the sessions that they start.

    instance: a text that tells this server from others: a browser sends a cookie to every port of
    a host, so each server has a name of its own for it.
    """

    def __init__(self, instance: str, monotonic: Callable[[], float]) -> None:
        self.cookie = f"warpwatch-{hashlib.sha256(instance.encode()).hexdigest()[:8]}"
        self.links: Keys[C] = Keys(LINK_S, monotonic)
        self._sessions: Keys[C] = Keys(SESSION_S, monotonic)

    def find(self, cookies: Mapping[str, str]) -> C | None:
        """Return the caller of the session that the cookies name."""
        key = cookies.get(self.cookie)
        return self._sessions.find(key) if key else None

    def start(self, caller: C, *, tls: bool) -> str:
        """Return the header Set-Cookie of a new session.

        Lax, not Strict: a link in a message or a dashboard is to open the page, logged in.
        """
        return self._header(self._sessions.issue(caller), SESSION_S, tls)

    def end(self, cookies: Mapping[str, str], *, tls: bool) -> str:
        """End the session that the cookies name, and return the header that removes the cookie."""
        self._sessions.end(cookies.get(self.cookie, ""))
        return self._header("", 0, tls)

    def _header(self, value: str, lasts_s: float, tls: bool) -> str:
        secure = "; Secure" if tls else ""
        return (
            f"{self.cookie}={value}; Path=/; Max-Age={lasts_s:.0f}; HttpOnly; SameSite=Lax{secure}"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
