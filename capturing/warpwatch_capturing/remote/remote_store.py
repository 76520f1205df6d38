"""The remote store: what outlasts the node, in an object store by ``obstore``.

It is only written and read by name: nothing here lists or deletes. Credentials come from the
environment or the workload's identity, as the provider's own tools take them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from warpwatch_telemetry.errors import UsageError, WarpwatchError

# The least part that S3 takes, and how many are on their way: a put takes some 40 MB at most,
# however large the file is.
PART_BYTES = 5 * 2**20
PARTS_AT_ONCE = 2
CONNECT_TIMEOUT_S = 10
# Of one request with its body: both parts at 170 kB/s.
REQUEST_TIMEOUT_S = 60
# Within one put; who uploads tries again much later.
RETRIES = 2
RETRY_TIMEOUT_S = 60
READ_BYTES = 2**20
# Of what is read into memory: records and summaries.
MAX_DOCUMENT_BYTES = 16 * 2**20
_PROVIDERS = ("AWS", "GOOGLE", "AZURE")
_QUERY = re.compile(r"\?\S+")


class RemoteStoreError(WarpwatchError):
    """One line; ``missing``: there is no such object, or no such bucket."""

    def __init__(self, text: str, *, missing: bool = False) -> None:
        super().__init__(text)
        self.missing = missing


class RemoteStore:
    """Every call waits for the network, for minutes where the store does not answer.

    Not for a process that forks afterwards without exec: obstore hangs in the child.
    """

    def __init__(self, url: str, environ: Mapping[str, str] = os.environ) -> None:
        """Raises UsageError for an address that cannot be one, and without obstore."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise UsageError(
                f"{url} needs obstore: install the extra warpwatch[remote] ({error})"
            ) from error
        self.url = url.rstrip("/")
        self._obstore: Any = obstore
        folder = {"mkdir": True} if url.startswith("file:") else {}
        try:
            self._store: Any = from_url(
                url, client_options=_client_options(environ), retry_config=_RETRY, **folder
            )
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise UsageError(f"{url}: {_line(error)}") from error

    def put(self, key: str, content: Path | bytes) -> None:
        """What the key had before is replaced. Raises RemoteStoreError."""
        with self._errors(key):
            self._obstore.put(
                self._store, key, content, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )

    def read(self, key: str) -> bytes:
        """A small document. Raises RemoteStoreError."""
        with self._errors(key):
            result = self._obstore.get(self._store, key)
            if result.meta["size"] > MAX_DOCUMENT_BYTES:
                raise RemoteStoreError(f"{self.url}/{key}: more than {MAX_DOCUMENT_BYTES} bytes")
            return bytes(result.bytes())

    def fetch(self, key: str, path: Path) -> None:
        """Write the object into a new file. Raises RemoteStoreError, and OSError of the file."""
        with self._errors(key):
            chunks = iter(self._obstore.get(self._store, key).stream(min_chunk_size=READ_BYTES))
        with path.open("xb") as file:
            while chunk := self._next(chunks, key):
                file.write(chunk)

    def _next(self, chunks: Iterator[bytes], key: str) -> bytes:
        with self._errors(key):
            return bytes(next(chunks, b""))

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise RemoteStoreError(f"{self.url}/{key}: {_line(error)}", missing=True) from error
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise RemoteStoreError(f"{self.url}/{key}: {_line(error)}") from error


_RETRY = {
    "max_retries": RETRIES,
    "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
    "backoff": {
        "init_backoff": timedelta(seconds=0.5),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}


def _client_options(environ: Mapping[str, str]) -> dict[str, Any]:
    # With options of our own, obstore 0.12 no longer looks for this in the environment.
    plain = [environ.get(f"{name}_ALLOW_HTTP", "") for name in _PROVIDERS]
    return {
        "allow_http": any(value.lower() in ("1", "true", "yes", "on") for value in plain),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
    }


def _line(error: Exception) -> str:
    """Without what follows for the library's own developers, and without signatures of URLs."""
    return _QUERY.sub("", str(error).partition("\n")[0])[:300]
