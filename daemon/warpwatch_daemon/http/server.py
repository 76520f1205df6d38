"""Listening: sockets, TLS, and uvicorn with what a small daemon needs of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn

from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http import certificate, web_config
from warpwatch_daemon.http.access import is_loopback
from warpwatch_daemon.http.agent import Agent
from warpwatch_daemon.http.app import create_app
from warpwatch_daemon.http.basic_auth import BasicAuth
from warpwatch_daemon.http.connection import HEAD_TIMEOUT_S, KEEP_ALIVE_S, Connection
from warpwatch_daemon.http.metrics import MetricsPages
from warpwatch_daemon.http.web_config import Tls, WebConfig
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
SHUTDOWN_TIMEOUT_S = 2
CERTIFICATE_INTERVAL_S = 10
EXPIRY_LOG_INTERVAL = timedelta(days=1)
# What uvicorn's on_tick counts in: it does its work at every such tick.
TICKS_A_SECOND = 10


class Server:
    """``bind``, then ``run`` in the main thread until ``stop`` is called from anywhere."""

    def __init__(
        self, agent: Agent, config: HttpConfig, head_timeout_s: float = HEAD_TIMEOUT_S
    ) -> None:
        """Raises UsageError when web_config or what it names cannot be used."""
        self._agent = agent
        self._config = config
        self._head_timeout_s = head_timeout_s
        web = web_config.load(config.web_config) if config.web_config else WebConfig()
        self._tls = Tls(web.tls_server_config) if web.tls_server_config else None
        self._basic_auth = BasicAuth(web.basic_auth_users) if web.basic_auth_users else None
        self._socket: socket.socket | None = None
        self._uvicorn: _Uvicorn | None = None
        self._expiry_checked_at: datetime | None = None

    def bind(self) -> None:
        """Take the address. Raises UsageError that names http.listen."""
        listener = _listen(self._config.listen)
        self._socket = listener
        loopback = is_loopback(str(listener.getsockname()[0]))
        try:
            app = create_app(
                self._agent, self._config, loopback=loopback, basic_auth=self._basic_auth
            )
        except UsageError:
            listener.close()
            raise
        pages: MetricsPages = app.state.pages
        connection = functools.partial(Connection, head_timeout_s=self._head_timeout_s)
        config = _uvicorn_config(app, connection, self._refresh_certificate)
        self._uvicorn = _Uvicorn(config, pages.refresh)
        self._uvicorn.config.load()
        # Not by file name: the context is ours, so that a renewed certificate gets into it.
        self._uvicorn.config.ssl = self._tls.context if self._tls else None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that were bound."""
        assert self._socket is not None, "bind first"
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """Where the page is, as seen from this machine."""
        host, port = self.address
        scheme = "https" if self._tls else "http"
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"

    def run(self) -> None:
        """Serve until ``stop``; signals are the caller's."""
        assert self._uvicorn is not None and self._socket is not None, "bind first"
        asyncio.run(self._uvicorn.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """End ``run``; from any thread or a signal handler, also before ``run``."""
        if self._uvicorn is not None:
            self._uvicorn.stop()

    async def _refresh_certificate(self) -> None:
        if self._tls is None:
            return
        try:
            if self._tls.refresh():
                logger.info("took up the renewed certificate %s", self._tls.config.cert_file)
                self._expiry_checked_at = None
        except (OSError, ssl.SSLError) as error:
            logger.warning("the certificate stays as it was: %s", error)
        self._warn_of_expiry(self._tls.config.cert_file, datetime.now(UTC))

    def _warn_of_expiry(self, path: Path, now: datetime) -> None:
        """Once a day, and at once of a certificate that is new."""
        last = self._expiry_checked_at
        if last is not None and now - last < EXPIRY_LOG_INTERVAL:
            return
        self._expiry_checked_at = now
        trouble = certificate.trouble(path, now)
        if trouble is not None:
            logger.warning("http.web_config: %s", trouble)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, each_second: Callable[[], None]) -> None:
        super().__init__(config)
        self._each_second = each_second
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopped.set)

    async def main_loop(self) -> None:
        """Ticks once a second, not ten times: an idle daemon is to be idle."""
        self._loop = asyncio.get_running_loop()
        ticks = 0
        while not await self.on_tick(ticks * TICKS_A_SECOND):
            ticks += 1
            self._each_second()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the daemon."""
        yield


def _uvicorn_config(app: Any, connection: Any, notify: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        # A peer is who connects, whatever X-Forwarded-For says.
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        callback_notify=notify,
        timeout_notify=CERTIFICATE_INTERVAL_S,
    )


def _listen(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if int(port) > 65535:
        raise UsageError(f"http.listen {listen!r}: a port is at most 65535")
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    name = host.strip("[]") or everywhere
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        # localhost may be both; IPv4 sorts first.
        family, _, _, _, address = min(found, key=lambda info: info[0])
        listener = socket.create_server(
            (str(address[0]), int(port)), family=family, dualstack_ipv6=name == "::"
        )
        # Inherited by connections: head and body are two writes, and Nagle would hold the second.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UsageError(f"http.listen {listen!r}: {_explain(error, port)}") from error


def _explain(error: OSError, port: str) -> str:
    if error.errno == errno.EADDRINUSE:
        who = "; 9400 is also dcgm-exporter's own" if port == "9400" else ""
        return (
            f"the port is taken by another process{who}; "
            "set http.listen (WARPWATCH_HTTP__LISTEN) to a free one, e.g. 127.0.0.1:9401"
        )
    if error.errno == errno.EACCES:
        return "this port needs privileges; take one above 1023"
    return f"{error.strerror or error}; name an address of this machine, e.g. 127.0.0.1:9400"
