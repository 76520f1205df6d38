"""Listening: sockets, TLS, and uvicorn with what a small daemon needs of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn

from warpwatch_serving import certificate, web_config
from warpwatch_serving.app import Routes, create_app, only_common_routes
from warpwatch_serving.basic_auth import BasicAuth
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import KEEP_ALIVE_S, Connection, OpenConnections
from warpwatch_serving.listening import listen_locally, listen_on
from warpwatch_serving.metrics import MetricsPages
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.peer import is_loopback
from warpwatch_serving.probes import Probes
from warpwatch_serving.watcher import Watcher
from warpwatch_serving.web_config import Tls, WebConfig
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
SHUTDOWN_TIMEOUT_S = 2
CERTIFICATE_INTERVAL_S = 10
EXPIRY_LOG_INTERVAL = timedelta(days=1)
# What uvicorn's on_tick counts in: it does its work at every such tick.
TICKS_A_SECOND = 10
BESIDES_BACKLOG = 16

_Factory = Callable[[], asyncio.Protocol]


class Server:
    """Listens at once; ``run`` in the main thread until ``stop`` is called from anywhere.

    Raises UsageError that names the key of an address that cannot be taken, or where web_config or
    what it names cannot be used.
    """

    def __init__(
        self,
        watcher: Watcher,
        config: HttpConfig,
        page: PageEndpoint | None = None,
        routes: Routes = only_common_routes,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wall = wall
        web = web_config.load(config.web_config) if config.web_config else WebConfig()
        self._tls = Tls(web.tls_server_config) if web.tls_server_config else None
        basic_auth = BasicAuth(web.basic_auth_users) if web.basic_auth_users else None
        self._local: Path | None = None
        self._expiry_checked_at: datetime | None = None
        self._socket = listen_on(config.listen)
        loopback = is_loopback(self.address[0])
        try:
            app = create_app(
                watcher,
                config,
                loopback=loopback,
                basic_auth=basic_auth,
                page=page,
                routes=routes,
                monotonic=monotonic,
            )
            probes = config.probe_listen
            probe_socket = listen_on(probes, "http.probe_listen") if probes else None
        except UsageError:
            self._socket.close()
            raise
        app.state.port = self.address[1]
        pages: MetricsPages = app.state.pages
        connection = functools.partial(Connection, others=OpenConnections())
        served = _uvicorn_config(app, connection, self._refresh_certificate)
        self._uvicorn = _Uvicorn(served, pages.refresh)
        if probe_socket is not None:
            self._uvicorn.serve_besides(probe_socket, Probes(watcher.missing).connect)
        served.load()
        # Not by file name: the context is ours, so that a renewed certificate gets into it.
        served.ssl = self._tls.context if self._tls else None

    def bind_locally(self, path: Path) -> None:
        """Serve on this Unix socket, too. Raises OSError."""
        self._uvicorn.serve_besides(listen_locally(path))
        self._local = path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that were bound."""
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
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
        finally:
            if self._local is not None:
                self._local.unlink(missing_ok=True)

    def stop(self) -> None:
        """End ``run``; from any thread or a signal handler, also before ``run``."""
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
        self._warn_of_expiry(self._tls.config.cert_file, datetime.fromtimestamp(self._wall(), UTC))

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
        self._besides: list[tuple[socket.socket, _Factory]] = []

    def serve_besides(self, listener: socket.socket, factory: _Factory | None = None) -> None:
        """Without TLS: another listener of the API, or of the factory's protocol."""
        self._besides.append((listener, factory or self._make_connection))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for listener, factory in self._besides:
            # A short queue: the newest of a burst are not to push out the others unread.
            server = await loop.create_server(factory, sock=listener, backlog=BESIDES_BACKLOG)
            self.servers.append(server)

    def _make_connection(self) -> asyncio.Protocol:
        factory: Any = self.config.http_protocol_class
        made: asyncio.Protocol = factory(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

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
