"""``python -m warpwatch run -- python train.py``: a program that is observed, unchanged."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from warpwatch import rendezvous
from warpwatch.daemon_folder import find_daemon

PROGRAM = "python -m warpwatch run"
HELP = """usage: {program} [--job NAME] [--backend NAME] -- COMMAND [ARGUMENT ...]

Runs COMMAND with the shim: its steps, what they spend their time on, and its memory are reported
to the daemon of this node. COMMAND takes the place of this process, so status and signals are its
own.

  --job NAME      name of the training run (otherwise WARPWATCH_JOB, Slurm's, torchrun's, the
                  script's)
  --backend NAME  shim (the default), or kineto: no shim and no steps, only captures, which PyTorch
                  itself takes when the daemon asks. It sets KINETO_USE_DAEMON,
                  KINETO_IPC_SOCKET_DIR, KINETO_ONDEMAND_TRACE_DIR and, unless it is set already,
                  KINETO_CONFIG; nothing while no daemon runs. PyTorch then initialises CUDA at
                  import: choose the GPUs before (docs/kineto.md)

example: {program} --job llama-7b -- torchrun --nproc-per-node 8 train.py
"""
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"
KINETO_CONFIG = Path(__file__).resolve().parent / "kineto.conf"
BACKENDS = ("shim", "kineto")


class BadArguments(ValueError):
    """Arguments that cannot be run; the text says what to do."""


class NoDaemon(Exception):
    """There is no daemon that PyTorch could ask; the text says what is missing."""


class Launch(NamedTuple):
    """``variables``: what was asked for by option and goes into the command's environment."""

    command: list[str]
    variables: dict[str, str]
    backend: str


def parse(arguments: Sequence[str]) -> Launch:
    """Raises BadArguments."""
    values: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option == "--":
            break
        if option not in ("--job", "--backend"):
            raise BadArguments(
                f"unknown option {option}, there are only --job NAME and --backend NAME"
            )
        if not value and rest:
            value = rest.pop(0)
        if not value or value == "--":
            raise BadArguments(f"{option} needs a name")
        values[option] = value
    backend = values.get("--backend", "shim")
    if backend not in BACKENDS:
        raise BadArguments(f"unknown back end {backend}, there are {' and '.join(BACKENDS)}")
    if not rest:
        raise BadArguments("no command to run, give it after --: -- python train.py")
    job = values.get("--job")
    return Launch(rest, {"WARPWATCH_JOB": job} if job else {}, backend)


def environment(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child with the shim. With WARPWATCH=0 it stays switched off."""
    child = {**environ, **variables}
    if environ.get("WARPWATCH") == "0":
        return child
    path = child.get("PYTHONPATH")
    child["PYTHONPATH"] = f"{BOOTSTRAP}{os.pathsep}{path}" if path else str(BOOTSTRAP)
    child["WARPWATCH"] = "1"
    return child


def kineto_environment(
    variables: Mapping[str, str], environ: Mapping[str, str], uid: int
) -> dict[str, str]:
    """The environment of a child that PyTorch itself records. Raises NoDaemon.

    Without a daemon PyTorch would hold up the end of the process for seconds.
    """
    child = {**environ, **variables}
    if environ.get("WARPWATCH") == "0":
        return child
    folder, inbox = _daemon(environ, uid)
    child["KINETO_USE_DAEMON"] = "1"
    child["KINETO_IPC_SOCKET_DIR"] = folder
    child["KINETO_ONDEMAND_TRACE_DIR"] = inbox
    child.setdefault("KINETO_CONFIG", str(KINETO_CONFIG))
    return child


def _daemon(environ: Mapping[str, str], uid: int) -> tuple[str, str]:
    """(folder of its socket for Kineto, its inbox). Raises NoDaemon."""
    found = find_daemon(environ, uid)
    if found is None:
        raise NoDaemon("no daemon is running here")
    try:
        inbox = _inbox(found.fd) or rendezvous.inbox(found.candidate, environ, uid)
    finally:
        found.close()
    folder = os.path.join(os.path.abspath(found.candidate.path), rendezvous.KINETO)
    problem = _problem(os.path.join(folder, rendezvous.KINETO_SOCKET), found.owner_uid)
    if problem:
        raise NoDaemon(
            f"the daemon has no socket for Kineto in {folder} ({problem}); "
            "rendezvous.kineto: true opens it"
        )
    return folder, inbox


def _inbox(folder_fd: int) -> str:
    """Where the daemon has files put, in its own words; it is the one who names them to PyTorch."""
    try:
        fd = os.open(rendezvous.LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder_fd)
        with open(fd, "rb") as file:
            named = json.loads(file.read(4096))["inbox"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return named if isinstance(named, str) else ""


def _problem(path: str, owner_uid: int) -> str:
    """Why the daemon does not listen at this socket; empty when it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            if os.lstat(path).st_uid != owner_uid:
                return "it belongs to another user"
            asking.connect(path)
        except OSError as error:
            # What Python itself refuses, a path that no socket can have, has no number.
            return os.strerror(error.errno or errno.ENAMETOOLONG)
    return ""


def main(arguments: Sequence[str], prog: str = PROGRAM) -> int:
    """Become the command. Returns only when that failed: 2, with one line on stderr."""
    if list(arguments[:1]) in (["--help"], ["-h"]):
        sys.stdout.write(HELP.format(program=prog))
        return 0
    try:
        launch = parse(arguments)
    except BadArguments as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    try:
        _execute(launch.command, _environment(launch, prog))
    except OSError as error:
        sys.stderr.write(f"{prog}: {launch.command[0]}: {error.strerror}\n")
    return 2


def _environment(launch: Launch, prog: str) -> dict[str, str]:
    if launch.backend == "shim":
        return environment(launch.variables, os.environ)
    try:
        return kineto_environment(launch.variables, os.environ, os.geteuid())
    except NoDaemon as reason:
        sys.stderr.write(f"{prog}: {reason}; the command runs unobserved\n")
        return {**os.environ, **launch.variables}


def _execute(command: list[str], environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and what is ignored stays so over exec: the command starts as from
    # a shell.
    ignored = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, environ)
    except OSError:
        for number, handler in ignored.items():
            signal.signal(number, handler)
        raise
