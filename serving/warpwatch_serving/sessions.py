"""Keys of browsers: a link that is valid once for a minute, and a session's cookie for 12 hours.

Both are in memory only, so that a restart ends them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Generic, TypeVar

LINK_S = 60.0
SESSION_S = 12 * 3600.0
# For one more, the oldest key of the user goes, or the oldest of all.
MAX_OF_USER = 16
MAX_KEYS = 1024

C = TypeVar("C")


class Keys(Generic[C]):
    """Secrets that stand for a caller's rights for ``lasts_s``; only their digests are kept."""

    def __init__(self, lasts_s: float, monotonic: Callable[[], float]) -> None:
        self._lasts_s = lasts_s
        self._monotonic = monotonic
        self._known: dict[bytes, tuple[C, float]] = {}

    def issue(self, caller: C) -> str:
        """Return a new key with the rights of the caller."""
        now = self._monotonic()
        self._known = {key: one for key, one in self._known.items() if one[1] > now}
        own = [key for key, (known, _) in self._known.items() if known == caller]
        if len(own) >= MAX_OF_USER or len(self._known) >= MAX_KEYS:
            del self._known[own[0] if len(own) >= MAX_OF_USER else next(iter(self._known))]
        key = secrets.token_urlsafe(32)
        self._known[_digest(key)] = caller, now + self._lasts_s
        return key

    def find(self, key: str) -> C | None:
        """Return the caller, None for a key that is unknown, used or expired."""
        caller, until = self._known.get(_digest(key), (None, 0.0))
        return caller if until > self._monotonic() else None

    def end(self, key: str) -> C | None:
        """Return the caller as ``find`` does, and forget the key."""
        caller = self.find(key)
        self._known.pop(_digest(key), None)
        return caller


def cookie_name(instance: str) -> str:
    """Return a name for this server's cookie: a browser sends it to every port of a host."""
    return f"warpwatch-{hashlib.sha256(instance.encode()).hexdigest()[:8]}"


def cookie(name: str, key: str, lasts_s: float, *, tls: bool) -> str:
    """Return the header Set-Cookie.

    Lax, not Strict: a link in a message or a dashboard is to open the page, logged in.
    """
    secure = "; Secure" if tls else ""
    return f"{name}={key}; Path=/; Max-Age={lasts_s:.0f}; HttpOnly; SameSite=Lax{secure}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
