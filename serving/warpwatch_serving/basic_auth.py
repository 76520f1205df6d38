"""Basic authentication with bcrypt hashes, as exporter-toolkit has it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
from collections.abc import Mapping
from types import ModuleType

from warpwatch_serving.answers import HttpError
from warpwatch_telemetry.errors import UsageError

# bcrypt itself looks at no more.
MAX_PASSWORD_BYTES = 72
MAX_REMEMBERED = 100
# Half a second of a core for each check of a password; 31, the highest, takes days.
MAX_COST = 13
# Compared with when the user is unknown, so that the time does not show which users exist.
_UNKNOWN_USER = "$2b$10$Xex9uoxw6CcXmL7CYl12geqnwljLC65zEQ5R3tga0X84FERdsX9Y6"


class BasicAuth:
    """``users``: bcrypt hashes by name. Raises UsageError when a hash is none or bcrypt missing."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._bcrypt = _import_bcrypt()
        self._users = dict(users)
        # A hash takes 50 ms and more; what was right once is remembered, salted by the hash.
        self._right: set[bytes] = set()
        self._turn = asyncio.Lock()
        for name, hashed in users.items():
            self._refuse_bad_hash(name, hashed)

    async def check(self, header: str) -> None:
        """Raises HttpError unless ``header`` (Authorization) holds a user's name and password."""
        credentials = _credentials(header)
        if credentials is None or not await self._matches(*credentials):
            raise HttpError(
                401,
                "unauthorized",
                "this daemon asks for a user and a password",
                {"WWW-Authenticate": 'Basic realm="warpwatch"'},
            )

    def _digest(self, name: str, password: bytes) -> bytes:
        hashed = self._users.get(name, _UNKNOWN_USER)
        return hashlib.sha256(hashed.encode() + password).digest()

    async def _matches(self, name: str, password: bytes) -> bool:
        digest = self._digest(name, password)
        if digest in self._right:
            return True
        hashed = self._users.get(name, _UNKNOWN_USER)
        # One at a time: guessing passwords must not take every core from the training job.
        async with self._turn:
            right = await asyncio.to_thread(self._compare, password, hashed)
        if not right or name not in self._users:
            return False
        if len(self._right) >= MAX_REMEMBERED:
            self._right.clear()
        self._right.add(digest)
        return True

    def _compare(self, password: bytes, hashed: str) -> bool:
        return bool(self._bcrypt.checkpw(password[:MAX_PASSWORD_BYTES], hashed.encode()))

    def _refuse_bad_hash(self, name: str, hashed: str) -> None:
        try:
            cost = int("".join(hashed.split("$")[2:3]))
            if cost > MAX_COST:
                raise UsageError(
                    f"http.web_config: the hash of user {name!r} has cost {cost}, at most "
                    f"{MAX_COST} is allowed: each step doubles the time of a check"
                )
            self._compare(b"", hashed)
        except ValueError as error:
            raise UsageError(
                f"http.web_config: the password of user {name!r} is no bcrypt hash; "
                "make one with `htpasswd -nBC 10 ''`"
            ) from error


def _import_bcrypt() -> ModuleType:
    try:
        return importlib.import_module("bcrypt")
    except ImportError as error:
        raise UsageError(
            "http.web_config: basic_auth_users needs bcrypt: install the extra warpwatch[auth]"
        ) from error


def _credentials(header: str) -> tuple[str, bytes] | None:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # no ASCII, no base64, no UTF-8
        return None
