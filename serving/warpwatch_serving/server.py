"""Listening and serving: TCP ports, the Unix socket, one from systemd, renewed certificates."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warpwatch_runtime.supervisor import Pause
from warpwatch_serving.access import Keys
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Connections, identify
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.routes import Routes, create_app, only_common_routes
from warpwatch_serving.web_config import BasicAuth, Tls, WebConfig, load
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
ACCEPT_PAUSE_S = 0.1  # after an error: a lack of descriptors lasts
LONGEST_PAUSE_S = 60.0
FOLDER_MODE = 0o755
BACKLOG = 128
# Errors that pass by themselves: another process has the port, or the address is not up yet.
PASSING = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


class Listeners:
    """Accepts connections on any number of sockets, in one event loop, until ``stop``."""

    def __init__(self, each_second: Callable[[], None]) -> None:
        self._each_second = each_second
        self._new: list[tuple[socket.socket, Connections]] = []
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, listener: socket.socket, connections: Connections) -> None:
        """Accept on this socket as well, within a second; the socket is closed at the end."""
        listener.setblocking(False)
        self._new.append((listener, connections))

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
                    listener, connections = self._new.pop()
                    task = asyncio.create_task(_accept(listener, connections))
                    ending.push_async_callback(connections.close, SHUTDOWN_TIMEOUT_S)
                    ending.callback(listener.close)
                    ending.callback(task.cancel)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), 1.0)
        for listener, _ in self._new:
            listener.close()


async def _accept(listener: socket.socket, connections: Connections) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError:
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        try:
            connections.serve(accepted, identify(accepted))
        except OSError:
            accepted.close()
        # If many connect, those that are accepted already get their turn.
        await asyncio.sleep(0)


def probes(missing: Callable[[], tuple[str, ...]]) -> Starlette:
    """Return the application of ``http.probe_listen``; ``missing``: why it is not ready."""

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        ready = not missing()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    app = Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz)])
    app.router.redirect_slashes = False
    return app


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
        sessions: Keys | None = None,
    ) -> None:
        try:
            web = load(config.web_config) if config.web_config else WebConfig()
            self._tls = Tls(web.tls_server_config) if web.tls_server_config else None
            basic_auth = BasicAuth(web.basic_auth_users) if web.basic_auth_users else None
        except UsageError as error:
            raise UsageError(f"{config.section}.web_config: {error}") from error
        self.app = create_app(
            backend, config, basic_auth=basic_auth, page=page, routes=routes, monotonic=monotonic,
            sessions=sessions,
        )  # fmt: skip
        self._local: Path | None = None
        self._connections = Connections(self.app, self._tls)
        self._listeners = Listeners(self._each_second)
        # From any thread or a signal handler, also before ``run``.
        self.stop = self._listeners.stop
        self._listen, self._key = config.listen, f"{config.section}.listen"
        self._pause = Pause(monotonic, LONGEST_PAUSE_S)
        self._socket: socket.socket | None = None
        self.trouble = ""
        backend.metrics.gauge("http_up").set_function(lambda: not self.trouble)
        self._start(passed)
        if config.probe_listen:
            listener = listen_on(config.probe_listen, f"{config.section}.probe_listen")
            self._listeners.add(listener, Connections(probes(backend.missing)))

    def _start(self, passed: socket.socket | None = None) -> None:
        """Listen, or note why to try again later. Raises UsageError if waiting does not help."""
        try:
            self._socket = passed or listen_on(self._listen, self._key)
        except UsageError as error:
            if getattr(error.__cause__, "errno", None) not in PASSING:
                raise
            if self._pause.begin():
                logger.warning("%s; trying again", error)
            self.trouble = str(error)
            return
        self.trouble = ""
        self.app.state.port, self.app.state.url = self.address[1], self.url
        self._listeners.add(self._socket, self._connections)

    def bind_locally(self, path: Path) -> None:
        """Serve on this Unix socket, too. Raises OSError."""
        self._listeners.add(listen_locally(path), self._connections)
        self._local = path

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
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        name = f"[{reachable}]" if ":" in reachable else reachable
        return f"{'https' if self._tls else 'http'}://{name}:{port}/"

    def run(self) -> None:
        """Serve until ``stop``; signals are the caller's."""
        try:
            asyncio.run(self._listeners.serve())
        finally:
            if self._local is not None:
                self._local.unlink(missing_ok=True)

    def _each_second(self) -> None:
        self.app.state.pages.refresh()
        if self._socket is None and not self._pause.lasts:
            with contextlib.suppress(UsageError):
                self._start()
        if self._tls:
            self._tls.renew()


def listen_on(listen: str, key: str) -> socket.socket:
    """Listen on a TCP address. Raises UsageError, with its cause, that names the key."""
    host, _, port = listen.rpartition(":")
    name = host.strip("[]") or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        # localhost may be both; IPv4 sorts first.
        family, _, _, _, address = min(found, key=lambda info: info[0])
        where, is_dual = (str(address[0]), int(port)), name == "::"
        return socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{key} {listen!r}: {_explain(error, port, key)}") from error


def _explain(error: OSError | UnicodeError, port: str, key: str) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        variable = f"WARPWATCH_{key.upper().replace('.', '__')}"
        who = "; 9400 is also dcgm-exporter's own" if port == "9400" else ""
        return (
            f"the port is taken by another process{who}; "
            f"set {key} ({variable}) to a free one, e.g. 127.0.0.1:9402"
        )
    if number == errno.EACCES:
        return "this port needs privileges; take one above 1023"
    return f"{error.args[-1]}; name an address of this machine, e.g. 127.0.0.1:9400"


def passed_by_systemd(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the first TCP socket of the socket unit, if there is one; see sd_listen_fds(3).

    The variables are removed, so that no child process takes the descriptors for its own.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return None
    # systemd passes sockets from this descriptor on.
    passed = [socket.socket(fileno=3 + number) for number in range(int(count))]
    for one in passed:
        one.set_inheritable(False)
    return next((one for one in passed if one.family in (socket.AF_INET, socket.AF_INET6)), None)


def listen_locally(path: Path) -> socket.socket:
    """Listen on a Unix socket in a folder of this process's own. Raises OSError."""
    path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner_uid = os.fstat(folder).st_uid
        if owner_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{path.parent} belongs to another user")
        # A volume that the kubelet has mounted is root's, even if the daemon is not.
        if owner_uid == os.geteuid():
            os.fchmod(folder, FOLDER_MODE)
        # By the folder's descriptor: a socket's path may have 107 bytes at most.
        name = f"/proc/self/fd/{folder}/{path.name}"
        with socket.socket(socket.AF_UNIX) as other:
            if other.connect_ex(name) == 0:
                raise OSError(errno.EADDRINUSE, "another process serves it")
        # A process before this one left it.
        path.unlink(missing_ok=True)
        listener = socket.create_server(name, family=socket.AF_UNIX, backlog=BACKLOG)
        path.chmod(0o666)  # every user may connect: the daemon sees which user it is
        return listener
    finally:
        os.close(folder)
