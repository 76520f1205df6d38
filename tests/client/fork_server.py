"""A process that has imported torch and forks for each program, instead of an import for each.

    python -m tests.client.fork_server DESCRIPTOR

``DESCRIPTOR`` is a socket. Each message on it is a request, with the program's standard streams and
a pipe: the program's PID is written there, then its status. The process ends with its clients.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Only a hang reaches it.
DEADLINE_S = 300.0
# The modules of all loops, which loop_base.py runs by name.
LOOPS = (
    # First: its clock comes before the hooks, which the import of torch installs.
    "tests.client.loop_base",
    "tests.client.data_loops",
    "tests.client.library_loops",
    "tests.client.shapes",
    "tests.client.shapes_frameworks",
    "tests.client.shapes_parallel",
    "tests.client.shapes_unloaded",
    "tests.client.training_loops",
)
RUN_LOOP = "import sys\nfrom tests.client.loop_base import run\nrun(sys.argv[2])"
# The first torch.compile imports this, which takes a second.
COMPILER = ("torch._dynamo.backends.debugging", "torch._inductor.compile_fx")


class Forked:
    """A program of a server, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(
        self, stdin: IO[str], stdout: IO[str], stderr: IO[str], status: IO[str], args: str
    ) -> None:
        self.stdin, self.stdout, self.stderr, self.args = stdin, stdout, stderr, args
        self._status = status
        self.pid = int(status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float = DEADLINE_S) -> int:
        ended = self._ended(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return ended

    def _ended(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._status.readline()))
        return self.returncode

    def communicate(self, text: str = "", timeout: float = DEADLINE_S) -> tuple[str, str]:
        self.stdin.write(text)
        self.stdin.close()
        self.wait(timeout)
        self.stderr.seek(0)
        return self.stdout.read(), self.stderr.read()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()
        for file in (self.stdin, self.stdout, self.stderr, self._status):
            file.close()


class Request(NamedTuple):
    """``code`` runs as ``__main__`` once ``modules`` are imported; without it a server starts."""

    code: str
    arguments: list[str]
    environ: dict[str, str]
    folder: str
    modules: list[str]


class ForkServer:
    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | Forked) -> None:
        self._control = control
        self._process = process

    def fork(
        self, code: str, *arguments: str, environ: Mapping[str, str], folder: Path = ROOT
    ) -> Forked:
        """Run a program. Its standard error is a file: nothing has to read it meanwhile."""
        request = Request(code, list(arguments), dict(environ), str(folder), [])
        (stdin, write), (read, stdout) = os.pipe(), os.pipe()
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the program's, until it is closed)
        status = self._send(request, stdin, stdout, errors.fileno())
        os.close(stdin)
        os.close(stdout)
        return Forked(os.fdopen(write, "w", 1), os.fdopen(read), errors, status, code)

    def importing(self, *modules: str, **environ: str) -> ForkServer:
        """A server that is forked of this one and has also imported ``modules``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = Request("", [], {**os.environ, **environ}, str(ROOT), list(modules))
        null = os.open(os.devnull, os.O_RDWR)
        with theirs:
            status = self._send(request, theirs.fileno(), null, 2)
        stdin, stdout, errors = (os.fdopen(os.dup(null), mode) for mode in ("w", "r", "r"))
        os.close(null)
        return ForkServer(ours, Forked(stdin, stdout, errors, status, f"a server of {modules}"))

    def _send(self, request: Request, *streams: int) -> IO[str]:
        read, status = os.pipe()
        socket.send_fds(self._control, [json.dumps(request).encode()], [*streams, status])
        os.close(status)
        return os.fdopen(read)

    def close(self) -> None:
        self._control.close()
        self._process.wait(timeout=DEADLINE_S)
        if isinstance(self._process, Forked):
            self._process.kill()


def start(*under: str) -> ForkServer:
    """Start a server; ``under`` is what comes before its module on the command line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, *under, "-m", "tests.client.fork_server", str(descriptor)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return ForkServer(ours, process)


class Loops(dict[str, dict[str, Any]]):
    """Return the counts of each loop, by its name. It runs when it is asked for, with no daemon."""

    def __init__(self, server: ForkServer, folder: Path, **environ: str) -> None:
        super().__init__()
        self._server = server
        self._folder = str(folder)
        self._environ = {**os.environ, "WARPWATCH_DIR": str(folder / "nowhere"), **environ}

    def __missing__(self, name: str) -> dict[str, Any]:
        process = self._server.fork(RUN_LOOP, self._folder, name, environ=self._environ)
        output, errors = process.communicate()
        process.kill()
        assert process.returncode == 0, errors
        found = self[name] = json.loads(output)
        assert (found["loop"], found["faults"]) == (name, 0), found
        return dict(found)


# --- in the server --------------------------------------------------------------------------------


def serve(control: socket.socket) -> Request:
    """Return in the forked process of each program, with its request. End with the clients."""
    while True:
        # Objects that the collector does not touch stay shared between all programs.
        gc.collect()
        gc.freeze()
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        while _reap(os.WNOHANG if data else 0):
            pass
        if not data:
            os._exit(0)
        request, (*streams, status) = Request(*json.loads(data)), descriptors
        if os.fork() == 0:
            program = os.fork()
            if program == 0:
                os.close(status)
                following = _become(request, streams)
                if following is None:
                    control.close()
                    return request
                control = following
                continue
            for stream in (0, 1, *streams, control.fileno()):
                os.close(stream)
            os.write(status, f"{program}\n".encode())
            os.write(status, f"{os.waitpid(program, 0)[1]}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(options: int) -> bool:
    try:
        return os.waitpid(-1, options)[0] > 0
    except ChildProcessError:
        return False


def _become(request: Request, streams: list[int]) -> socket.socket | None:
    """Take over the request's surroundings. Return the socket if it is to be a server."""
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.folder)
    for name in request.modules:
        importlib.import_module(name)
    if not request.code:
        return socket.socket(fileno=streams[0])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = ["-c", *request.arguments]
    return None


def main() -> None:
    if os.environ.get("WARPWATCH") == "1":
        for name in LOOPS:
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    # The first zero_grad imports it, for seconds.
    importlib.import_module("torch._dynamo")
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    exec(compile(request.code, "<string>", "exec"), vars(program))


if __name__ == "__main__":
    main()
