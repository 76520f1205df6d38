"""TLS and basic auth from a file in the format of Prometheus' exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. Keys that are
not supported are refused by name: a protection that is silently missing is worse than none.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from warpwatch_runtime.loading import mistakes, read_yaml
from warpwatch_serving.answers import HttpError
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.sections import Section

logger = logging.getLogger(__name__)

_CLIENT_AUTH = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

TlsVersion = Literal["TLS12", "TLS13"]


# The empty one as in the toolkit.
ClientAuth = Literal["", "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]


class TlsServerConfig(Section):
    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth_type: ClientAuth = "NoClientCert"
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"


class WebConfig(Section):
    tls_server_config: TlsServerConfig | None = None
    basic_auth_users: dict[str, str] = Field(default_factory=dict)


def load(path: Path) -> WebConfig:
    """Read the file, with paths relative to its folder. Raises UsageError with one line."""
    tree = read_yaml(path)
    try:
        config = WebConfig.model_validate({} if tree is None else tree)
    except ValidationError as error:
        raise UsageError(f"{path}: {_explain(error)}") from error
    tls = config.tls_server_config
    if tls is None:
        return config
    names = ("cert_file", "key_file", "client_ca_file")
    absolute = {name: path.parent / file for name in names if (file := getattr(tls, name))}
    return config.model_copy(update={"tls_server_config": tls.model_copy(update=absolute)})


class Tls:
    """The server's side of TLS. ``renew``, called each second, keeps ``context`` up to date."""

    def __init__(self, config: TlsServerConfig) -> None:
        """Load the certificate. Raises UsageError if a file cannot be used."""
        self._config = config
        _check_client_auth(config)
        try:
            self._version = self._files()
            self.context = self._loaded()
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"the certificate cannot be used: {error}") from error

    def _loaded(self) -> ssl.SSLContext:
        """Return a context with the files as they are now. Raises OSError, SSLError."""
        config = self._config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[config.min_version]
        context.maximum_version = _VERSIONS[config.max_version]
        context.load_cert_chain(config.cert_file, config.key_file)
        if config.client_ca_file is not None:
            context.load_verify_locations(config.client_ca_file)
        context.verify_mode = _CLIENT_AUTH[config.client_auth_type]
        return context

    def renew(self) -> None:
        """Use changed files for new connections; keep the old ones if that fails."""
        version = self._files()
        if version == self._version:
            return
        self._version = version
        try:
            self.context = self._loaded()
            logger.info("reloaded the renewed certificate %s", self._config.cert_file)
        except (OSError, ssl.SSLError) as error:
            logger.warning("reload failed, old certificate kept: %s", error)

    def _files(self) -> tuple[int, ...]:
        """Return the times of the files, or nothing while one is missing."""
        try:
            own = self._config
            files = filter(None, (own.cert_file, own.key_file, own.client_ca_file))
            return tuple(os.stat(path).st_mtime_ns for path in files)
        except OSError:
            return ()


def _check_client_auth(config: TlsServerConfig) -> None:
    asked = _CLIENT_AUTH[config.client_auth_type] != ssl.CERT_NONE
    if asked != (config.client_ca_file is not None):
        raise UsageError(
            "client_ca_file and a client_auth_type that verifies "
            "(VerifyClientCertIfGiven, RequireAndVerifyClientCert) go together"
        )


def _explain(error: ValidationError) -> str:
    """Return the mistake without the value, which may be a password."""
    first = mistakes(error, WebConfig)[0]
    if first.kind == "extra_forbidden":
        return f"{first.path}: not supported"
    return first.without_value()


# bcrypt itself looks at no more.
MAX_PASSWORD_BYTES = 72
MAX_REMEMBERED = 100
# Half a second of a core for each check of a password; 31, the highest, takes days.
MAX_COST = 13
# Compared with when the user is unknown, so that the time does not show which users exist.
_UNKNOWN_USER = "$2b$10$Xex9uoxw6CcXmL7CYl12geqnwljLC65zEQ5R3tga0X84FERdsX9Y6"


class BasicAuth:
    """Users and their bcrypt hashes. Raises UsageError for a bad hash or if bcrypt is missing."""

    def __init__(self, users: Mapping[str, str]) -> None:
        try:
            self._bcrypt = importlib.import_module("bcrypt")
        except ImportError as error:
            raise UsageError(
                "basic_auth_users needs bcrypt: install the extra warpwatch[auth]"
            ) from error
        self._users = dict(users)
        # A hash takes 50 ms and more; what was right once is remembered, salted by the hash.
        self._right: set[bytes] = set()
        self._turn = asyncio.Lock()
        for name, hashed in users.items():
            self._refuse_bad_hash(name, hashed)

    async def check(self, header: str) -> None:
        """Raise HttpError unless ``header`` (Authorization) holds a user's name and password."""
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
                    f"the hash of user {name!r} has cost {cost}, at most "
                    f"{MAX_COST} is allowed: each step doubles the time of a check"
                )
            self._compare(b"", hashed)
        except ValueError as error:
            raise UsageError(
                f"the password of user {name!r} is not a bcrypt hash; "
                "make one with `htpasswd -nBC 10 ''`"
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
