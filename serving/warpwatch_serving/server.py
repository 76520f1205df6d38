"""Listening and serving: TCP ports, the Unix socket, and renewed certificates."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from warpwatch_runtime.supervisor import Pause
from warpwatch_serving import listening, web_config
from warpwatch_serving.access import identify
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Connections, Service
from warpwatch_serving.guard import Prepare
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.routes import Routes, create_app, only_common_routes
from warpwatch_serving.web_config import BasicAuth, Tls, WebConfig
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
EXHAUSTED_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listeners:
    """Accepts connections on any number of sockets, in one event loop, until ``stop``."""

    def __init__(self, each_second: Callable[[], None]) -> None:
        self._each_second = each_second
        self._new: list[tuple[socket.socket, Service, Connections]] = []
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, listener: socket.socket, service: Service, connections: Connections) -> None:
        """Accept on this socket as well, within a second; the socket is closed at the end."""
        self._new.append((listener, service, connections))

    def stop(self) -> None:
        """Stop ``serve``; from any thread or a signal handler, also before ``serve``."""
        if self._loop is None:
            self._stopped.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as ending:
            while not self._stopped.is_set():
                self._each_second()
                while self._new:
                    listener, service, connections = self._new.pop()
                    task = asyncio.create_task(_accept(listener, service, connections))
                    ending.push_async_callback(connections.close, SHUTDOWN_TIMEOUT_S)
                    ending.callback(listener.close)
                    ending.callback(task.cancel)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), 1.0)
        for listener, _, _ in self._new:
            listener.close()


async def _accept(listener: socket.socket, service: Service, connections: Connections) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError as error:
            # A connection that failed before it was accepted is gone; a lack of descriptors lasts.
            await asyncio.sleep(EXHAUSTED_PAUSE_S if error.errno in _EXHAUSTED else 0)
            continue
        try:
            connections.serve(accepted, identify(accepted), service)
        except OSError:
            accepted.close()
        # If many connect, those that are accepted already get their turn.
        await asyncio.sleep(0)


class Probes:
    """The application of ``http.probe_listen``. ``missing`` returns why a process is not ready."""

    def __init__(self, missing: Callable[[], tuple[str, ...]]) -> None:
        self._missing = missing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready = not (scope["path"] == "/readyz" and self._missing())
        status, document = 200 if ready else 503, f'{{"ready": {str(ready).lower()}}}\n'
        if scope["path"] == "/healthz":
            document = '{"status": "ok"}\n'
        elif scope["path"] != "/readyz" or scope["method"] not in ("GET", "HEAD"):
            status, document = 404, '{"error": {"reason": "not_found", "detail": "only probes"}}\n'
        await Response(document, status, media_type="application/json")(scope, receive, send)


class Server:
    """The HTTP server of an agent or a fleet. Listens at once, and serves in ``run``.

    Raises UsageError that names the key of an address that can never be listened on, or if
    web_config or a file in it cannot be used. A port that another process has is tried again;
    ``trouble`` is why ``http.listen`` is not served, empty if it is.
    """

    def __init__(
        self,
        backend: ApiBackend,
        config: HttpConfig,
        page: PageEndpoint | None = None,
        routes: Routes = only_common_routes,
        monotonic: Callable[[], float] = time.monotonic,
        passed: socket.socket | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        web = web_config.load(config.web_config) if config.web_config else WebConfig()
        self._tls = Tls(web.tls_server_config) if web.tls_server_config else None
        basic_auth = BasicAuth(web.basic_auth_users) if web.basic_auth_users else None
        self._app = create_app(
            backend, config, basic_auth=basic_auth, page=page, routes=routes, monotonic=monotonic,
            prepare=prepare,
        )  # fmt: skip
        self._local: Path | None = None
        self._connections = Connections()
        self._listeners = Listeners(self._each_second)
        self._listen = config.listen
        self._up = backend.metrics.gauge("http_up")
        self._pause = Pause(monotonic, LONGEST_PAUSE_S)
        self._socket: socket.socket | None = None
        self.trouble = ""
        self._start(passed)
        if config.probe_listen:
            probes = listening.listen_on(config.probe_listen, "http.probe_listen")
            self._listeners.add(probes, Service(Probes(backend.missing)), Connections())

    def _start(self, passed: socket.socket | None = None) -> None:
        """Listen, or note why to try again later. Raises UsageError if waiting does not help."""
        try:
            self._socket = passed or listening.listen_on(self._listen)
        except UsageError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in listening.PASSING:
                raise
            if self._pause.begin():
                logger.warning("%s; trying again", error)
            self.trouble = str(error)
            self._up.set(0)
            return
        self.trouble = ""
        self._up.set(1)
        self._app.state.port, self._app.state.url = self.address[1], self.url
        service = Service(self._app, self._tls.context if self._tls else None)
        self._listeners.add(self._socket, service, self._connections)

    def bind_locally(self, path: Path) -> None:
        """Serve on this Unix socket, too. Raises OSError."""
        self._listeners.add(listening.listen_locally(path), Service(self._app), self._connections)
        self._local = path

    @property
    def app(self) -> ASGIApp:
        """The application, for requests that come another way."""
        return self._app

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that are listened on. Raises UsageError if there are none."""
        if self._socket is None:
            raise UsageError(self.trouble)
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """The address of the page, as seen from this machine. Raises UsageError as ``address``."""
        host, port = self.address
        scheme = "https" if self._tls else "http"
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"

    def run(self) -> None:
        """Serve until ``stop``; signals are the caller's."""
        try:
            asyncio.run(self._listeners.serve())
        finally:
            if self._local is not None:
                self._local.unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop ``run``; from any thread or a signal handler, also before ``run``."""
        self._listeners.stop()

    def _each_second(self) -> None:
        self._app.state.pages.refresh()
        if self._socket is None and not self._pause.lasts:
            with contextlib.suppress(UsageError):
                self._start()
        if self._tls:
            self._tls.renew()
