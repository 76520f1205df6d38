"""The daemons of the other nodes, and passing an alert on to the one that has its ranks.

Alertmanager posts to one address, but an alert's ranks live on the node that Prometheus scraped it
from. Its ``instance`` says which, by address or by name; whether that is a daemon of ours, only the
name that ``http.peers`` gives decides: nothing, and above all no token, goes to an address that
only a label names.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from warpwatch_daemon.captures.alerts.alert_requests import MAX_DETAIL_CHARS, Answer
from warpwatch_daemon.captures.alerts.webhook import Alert, encode, plain
from warpwatch_telemetry.alerts import FORWARDED, PEER_FAILED

if TYPE_CHECKING:
    import http.client

PATH = "/api/v1/alertmanager"
# One hop: who gets a webhook with it passes nothing on.
FORWARDED_HEADER = "X-Warpwatch-Forwarded"
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 2**20


class PeerError(Exception):
    """A peer that could not be asked, or said no; in one line."""


class Peers:
    """``url``: of the name that resolves to all daemons' addresses, such as a headless service.

    ``token_file``: what they ask for, as this daemon does; ``ca_file``: who signs their
    certificates, None for the authorities that the system trusts. Every method may wait for the
    network.
    """

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._token_file = token_file
        self._ca_file = ca_file

    def addresses(self) -> frozenset[str]:
        """What the name resolves to now. Raises PeerError."""
        try:
            return _addresses(self._host)
        except (OSError, UnicodeError) as error:
            raise PeerError(f"http.peers: {self._host}: {error}") from error

    def resolve(self, name: str) -> frozenset[str]:
        """The addresses of an alert's host, none if there is no such. Raises PeerError."""
        try:
            return _addresses(name)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                return frozenset()
            raise PeerError(f"{name[:100]}: {error}") from error
        except (OSError, UnicodeError):
            return frozenset()

    def pass_on(self, address: str, alerts: Sequence[Alert]) -> list[Answer]:
        """What the daemon at ``address``, which must be one of ``addresses``, says of each."""
        try:
            said = self._post(address, encode(list(alerts)))
        except PeerError as error:
            return failed(alerts, f"{address}: {error}")
        return [
            _answer(alert, address, document) for alert, document in zip(alerts, said, strict=False)
        ] + failed(alerts[len(said) :], f"{address} said nothing of it")

    def _post(self, address: str, body: bytes) -> list[dict[str, Any]]:
        import http.client

        headers = {"Content-Type": "application/json", FORWARDED_HEADER: "1", **self._token()}
        try:
            connection = self._connect(address)
            try:
                connection.request("POST", PATH, body, headers)
                answer = connection.getresponse()
                content = answer.read(MAX_ANSWER_BYTES)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(str(error) or type(error).__name__) from error
        if answer.status != 200:
            raise PeerError(f"it answers {answer.status}")
        return _documents(content)

    def _connect(self, address: str) -> http.client.HTTPConnection:
        import http.client

        if not self._tls:
            return http.client.HTTPConnection(address, self._port, timeout=TIMEOUT_S)
        import ssl

        context = ssl.create_default_context(cafile=self._ca_file)
        # The certificate is of the name, the connection goes to one of its addresses.
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=TIMEOUT_S, context=context
        )
        plain = socket.create_connection((address, self._port), TIMEOUT_S)
        try:
            connection.sock = context.wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise
        return connection

    def _token(self) -> dict[str, str]:
        """Read each time, so that a new one is taken up."""
        if self._token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        except (OSError, UnicodeError) as error:
            raise PeerError(f"http.token_file: {error}") from error


def failed(alerts: Sequence[Alert], detail: str) -> list[Answer]:
    return [Answer(alert.fingerprint, PEER_FAILED, detail[:MAX_DETAIL_CHARS]) for alert in alerts]


def _addresses(name: str) -> frozenset[str]:
    """As ``plain``. Raises OSError and UnicodeError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return frozenset(plain(str(address[0])) for *_, address in found)


def _documents(content: bytes) -> list[dict[str, Any]]:
    try:
        alerts = json.loads(content)["alerts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PeerError("it is no warpwatch daemon") from error
    if not isinstance(alerts, list) or not all(isinstance(one, dict) for one in alerts):
        raise PeerError("it is no warpwatch daemon")
    return alerts


def _answer(alert: Alert, address: str, said: dict[str, Any]) -> Answer:
    """What the peer says, as far as it is what one says."""
    words = [str(said[key]) for key in ("outcome", "detail") if said.get(key)]
    capture_id = said.get("capture_id")
    detail = f"{address}: {': '.join(words)}"[:MAX_DETAIL_CHARS]
    known = capture_id[:64] if isinstance(capture_id, str) else None
    return Answer(alert.fingerprint, FORWARDED, detail, known)
