"""Talking to a running daemon: what the commands use."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from warpwatch.daemon.errors import Refused, UsageError, WarpwatchError

DEFAULT_URL = "http://127.0.0.1:9400"
TIMEOUT_S = 10.0


class ApiClient:
    """``token_file`` holds the bearer token that a daemon beyond loopback asks for."""

    def __init__(self, url: str = DEFAULT_URL, token_file: Path | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url!r} is no http:// or https:// address")
        self.url = url.rstrip("/")
        self._token = _read_token(token_file)

    def get(self, path: str) -> Any:
        """The JSON answer. Raises WarpwatchError when there is no daemon."""
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. Raises Refused with the daemon's reason."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return self._send(request)

    def _send(self, request: urllib.request.Request) -> Any:
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read()) from error
        except (ValueError, http.client.HTTPException) as error:
            raise WarpwatchError(f"what answers at {self.url} is no warpwatch daemon") from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise WarpwatchError(
                f"no daemon answers at {self.url} ({reason}); start one with `warpwatch daemon` "
                "or name it with --url"
            ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A daemon never redirects, and the token goes to nobody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


# No proxy either: the daemon is on this machine or named.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def _refusal(code: int, content: bytes) -> WarpwatchError:
    try:
        error = json.loads(content)["error"]
        return Refused(str(error["reason"]), str(error["detail"]))
    except (ValueError, KeyError, TypeError):
        return WarpwatchError(f"the daemon answered {code}")


def _read_token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}") from error
