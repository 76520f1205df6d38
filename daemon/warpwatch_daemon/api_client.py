"""Talking to a running daemon: what the commands use."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from warpwatch_daemon import api_socket
from warpwatch_telemetry.errors import Refused, UsageError, WarpwatchError

TIMEOUT_S = 10.0


class ApiClient:
    """``token_file`` holds the bearer token that a daemon asks for over TCP.

    With ``socket_path`` it is asked through its Unix socket, whatever ``url`` says; ``shown_url``
    is what leads a person to a path of the API. Over HTTPS the certificate must be signed by
    ``ca_file``, else by whom the system trusts, and be of ``server_name``, else of the URL's own
    host. Raises UsageError for a file that is none.
    """

    def __init__(
        self,
        url: str = api_socket.DEFAULT_URL,
        token_file: Path | None = None,
        *,
        ca_file: Path | None = None,
        server_name: str = "",
        socket_path: Path | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url!r} is no http:// or https:// address")
        self.url = self.where = self.shown_url = url.rstrip("/")
        self._token = _read_token(token_file)
        # No proxy: the daemon is on this machine or named.
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.ProxyHandler({}),
            _NoRedirect(),
        ]
        if socket_path is not None:
            self.where = str(socket_path)
            self.shown_url = f"curl --unix-socket {socket_path} http://localhost"
            handlers.append(_SocketHandler(socket_path))
        if url.startswith("https://"):
            handlers.append(_https(ca_file, server_name))
        self._opener = urllib.request.build_opener(*handlers)

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
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read()) from error
        except (ValueError, http.client.HTTPException) as error:
            raise WarpwatchError(f"what answers at {self.where} is no warpwatch daemon") from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise WarpwatchError(
                f"no daemon answers at {self.where} ({reason}); start one with `warpwatch daemon` "
                "or name it with --url"
            ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A daemon never redirects, and the token goes nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _SocketHandler(urllib.request.HTTPHandler):
    """HTTP through a Unix socket, whatever the URL says."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        def connect(host: str, **options: Any) -> http.client.HTTPConnection:
            return _SocketConnection(self._path, host, **options)

        return self.do_open(connect, request)


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = api_socket.connect(self._path, self.timeout)


class _Trust(ssl.SSLContext):
    """The certificate is of a name, the connection may go to one of its addresses."""

    server_name = ""

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        if self.server_name:
            options["server_hostname"] = self.server_name
        return super().wrap_socket(*arguments, **options)


def _https(ca_file: Path | None, server_name: str) -> urllib.request.HTTPSHandler:
    trust = _Trust(ssl.PROTOCOL_TLS_CLIENT)
    trust.server_name = server_name
    try:
        if ca_file is None:
            trust.load_default_certs()
        else:
            trust.load_verify_locations(ca_file)
    except OSError as error:
        raise UsageError(f"--ca-file {ca_file}: {error.strerror or error}") from error
    return urllib.request.HTTPSHandler(context=trust)


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
