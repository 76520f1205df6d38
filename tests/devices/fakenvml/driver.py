"""The fake NVIDIA driver: builds the library from the C files here, and steers it.

The library is a ``libnvidia-ml.so.1`` that is compiled against NVIDIA's own header (PyPI package
``nvidia-nvml-dev-cu12``). Its settings are in a text file; ``control.c`` and
``settings.def`` say what may stand there. It reads the file again whenever that is replaced, at
most 20 ms late, or at its next call once the file has set its clock.
"""

import fcntl
import functools
import mmap
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "libnvidia-ml.so.1"
# The rows of the call counters: one a GPU, then that of calls on no GPU (as in fakenvml.h).
MAX_GPUS = 16
MAX_EVENTS = 256
XID_EVENT = 0x8

Value = float | int | bool | str


class CannotBuild(Exception):
    """There is no compiler or no header here; the text says which."""


def header_folder() -> Path:
    """Where NVIDIA's ``nvml.h`` is installed. Raises CannotBuild."""
    try:
        files = metadata.files("nvidia-nvml-dev-cu12") or []
    except metadata.PackageNotFoundError as error:
        raise CannotBuild("nvidia-nvml-dev-cu12 is not installed") from error
    for file in files:
        if file.name == "nvml.h":
            return Path(str(file.locate())).parent
    raise CannotBuild("nvidia-nvml-dev-cu12 has no nvml.h")


@functools.cache
def setting_names() -> frozenset[str]:
    text = (SOURCES / "settings.def").read_text()
    return frozenset(re.findall(r"^SETTING\((\w+),", text, re.MULTILINE))


@functools.cache
def function_names() -> tuple[str, ...]:
    """Every function of the library, in the order of the call counters."""
    texts = "".join(path.read_text() for path in sorted(SOURCES.glob("*.c")))
    return tuple(sorted(set(re.findall(r"^nvmlReturn_t (nvml\w+)\(", texts, re.MULTILINE))))


def build(folder: Path) -> Path:
    """Compile the library into ``folder``, unless it is there, and return the folder.

    Raises CannotBuild, or CalledProcessError when the sources do not compile.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotBuild("there is no C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / LIBRARY).exists():
            _compile(compiler, folder)
    return folder


def _compile(compiler: str, folder: Path) -> None:
    names = " ".join(f"X({name})" for name in function_names())
    (folder / "functions.h").write_text(f"#define FUNCTIONS(X) {names}\n")
    shown = "".join(f" {name};" for name in (*function_names(), "nvmlErrorString"))
    (folder / "exports.map").write_text(f"{{ global:{shown} local: *; }};\n")
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    linking = [f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={folder / 'exports.map'}"]
    includes = [f"-I{folder}", "-isystem", str(header_folder())]
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    output = ["-o", str(folder / LIBRARY), "-lm"]
    command = [compiler, *flags, *includes, *linking, *sources, *output]
    subprocess.run(command, check=True, timeout=300)


class FakeDriver:
    """A driver in a state of its own: what its GPUs are, what they suffer from, who called them.

    ``environment`` makes a child process load it. GPUs have hardware numbers, not
    indices; ``gpu=None`` means all. Changes are seen by running processes within 20 ms.
    """

    def __init__(
        self, library: Path, folder: Path, profile: str = "h100", gpus: int = 8, **settings: Value
    ) -> None:
        self.library = library
        self.control_file = folder / "fakenvml.control"
        self.calls_file = folder / "fakenvml.calls"
        self._lines: dict[tuple[str, str], str] = {}
        self._events: list[str] = []
        self._sequence = 0
        self._written_ns = 0
        self._start = {"profile": profile, "gpus": gpus, **settings}
        folder.mkdir(parents=True, exist_ok=True)
        self.clear()

    @property
    def environment(self) -> dict[str, str]:
        """For a child process, on top of ``os.environ``."""
        paths = [str(self.library), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
            "FAKENVML_CONTROL": str(self.control_file),
            "FAKENVML_CALLS": str(self.calls_file),
        }

    def set(self, gpu: int | None = None, **settings: Value | None) -> None:
        """Set settings of ``settings.def``, or profile, driver_version, order; None takes back.

        Raises ValueError for a name that does not exist.
        """
        known = setting_names() | {"profile", "driver_version", "order"}
        for name, value in settings.items():
            if name not in known:
                raise ValueError(f"{name} is no setting of the fake driver")
            self._put(gpu, name, value)
        self._write()

    def fail(self, function: str, code: int, gpu: int | None = None) -> None:
        """Let a function return ``code``; 0: as usual again."""
        self._set_function("error", function, code, gpu)

    def hang(self, function: str | None = None, gpu: int | None = None, on: bool = True) -> None:
        if function is None:
            self.set(gpu, hang=on)
        else:
            self._set_function("hang", function, on, gpu)

    def field(
        self,
        number: int,
        *,
        value: float | None = None,
        error: int | None = None,
        fails_call: int | None = None,
        gpu: int | None = None,
    ) -> None:
        """Give a field a value, its own error, or one that fails the whole batch; None: none."""
        self._put(gpu, f"field_value:{number}", value)
        self._put(gpu, f"field_error:{number}", error)
        self._put(gpu, f"field_fails_call:{number}", fails_call)
        self._write()

    def mig(self, gpu: int | None, *devices: str) -> None:
        """Turn MIG mode on, with ``"<slot>=<profile>/<GI>/<CI>"`` each, or with ``"default"``."""
        self._put(gpu, "mig", " ".join(devices) or "none")
        self._write()

    def mig_off(self, gpu: int | None) -> None:
        self._put(gpu, "mig", None)
        self._write()

    def processes(self, gpu: int | None, *processes: str) -> None:
        """``"<pid or self>/<MiB or na>[/<C, G or M>[/<GI>/<CI>]]"``; none: nothing runs."""
        self._put(gpu, "processes", " ".join(processes) or "none")
        self._write()

    def event(
        self, gpu: int, kind: int, data: int, instances: tuple[int, int] | None = None
    ) -> None:
        self._sequence += 1
        words = [f"{gpu} event:{self._sequence} {kind} {data}", *map(str, instances or ())]
        self._events = [*self._events[1 - MAX_EVENTS :], " ".join(words)]
        self._write()

    def xid(self, gpu: int, xid: int, instances: tuple[int, int] | None = None) -> None:
        self.event(gpu, XID_EVENT, xid, instances)

    def clear(self, events: bool = False) -> None:
        """Back to how the driver was made: no faults; ``events``: nor what was raised."""
        self._lines.clear()
        if events:
            self._events.clear()
        self.set(None, **self._start)

    def calls(self) -> dict[int | None, dict[str, int]]:
        # A process that loads the library makes the file, and then gives it its size.
        if not self.calls_file.exists() or not self.calls_file.stat().st_size:
            return {}
        names = function_names()
        with (
            self.calls_file.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        ):
            counters = struct.unpack(f"={len(memory) // 8}Q", memory)
        rows = [counters[1 + row * len(names) :][: len(names)] for row in range(MAX_GPUS + 1)]
        found = {row: _nonzero(names, counts) for row, counts in enumerate(rows)}
        return {None if row == MAX_GPUS else row: calls for row, calls in found.items() if calls}

    def _set_function(self, key: str, function: str, value: Value, gpu: int | None) -> None:
        if function not in function_names():
            raise ValueError(f"{function} is no function of the fake driver")
        self._put(gpu, f"{key}:{function}", value)
        self._write()

    def _put(self, gpu: int | None, key: str, value: Value | None) -> None:
        who = "*" if gpu is None else str(gpu)
        if value is None:
            self._lines.pop((who, key), None)
        else:
            text = value if isinstance(value, str) else repr(+value)
            self._lines[who, key] = f"{who} {key} {text}"

    def _write(self) -> None:
        """Replaced at once, since the driver reads it at any time; what is for all comes first."""
        ordered = sorted(self._lines.items(), key=lambda item: item[0][0] != "*")
        lines = [*(line for _, line in ordered), *self._events]
        new = self.control_file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        # The driver knows a new file by its time, and files may follow each other within a tick.
        self._written_ns += 1
        os.utime(new, ns=(self._written_ns, self._written_ns))
        new.replace(self.control_file)


def _nonzero(names: Iterable[str], counts: Iterable[int]) -> dict[str, int]:
    return {name: count for name, count in zip(names, counts, strict=True) if count}
