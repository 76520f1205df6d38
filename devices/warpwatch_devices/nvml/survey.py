"""Reads every GPU once in a child process, which alone suffers if the driver hangs or crashes.

The child (``python -m warpwatch_devices.nvml.survey``) writes lines of JSON as answers come. A line
updates the reading of the GPU that it names, of a pair of GPUs, or of the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pynvml

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.nvml import library
from warpwatch_devices.nvml.fields import TimedReader
from warpwatch_devices.nvml.library import CallCosts, identify, read_facts
from warpwatch_devices.nvml.processes import COMPUTE, ProcessList
from warpwatch_devices.nvml.readers import ReaderSchedule, readers_of
from warpwatch_runtime.supervisor import MAX_THREADS, run_all
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.metric import Values

COMMAND = ("-P", "-m", "warpwatch_devices.nvml.survey")
DEFAULT_PATIENCE_S = 10.0
# A killed child needs a moment to exit.
_EXIT_TIMEOUT_S = 2.0
# A GPU has at most 7 MIG devices today.
_MAX_MIG_DEVICES = 64
# Parallel GPM calls have crashed drivers.
_GPM = threading.Lock()
_GPM_TIMEOUT_S = 2.0
# pynvml defines NVML_P2P_CAPS_INDEX_READ as a tuple.
_P2P_READ = 0
_OUTPUT = threading.Lock()
_ANSWERED = threading.Lock()


PCI_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
# PCI class codes: VGA controller and 3D controller.
_GPU_CLASSES = ("0x0300", "0x0302")
_CONFIG_BYTES = 4


class PciGpu(NamedTuple):
    """A GPU on the bus. ``driver``: its kernel driver, if any. ``lost``: fallen off the bus."""

    bus_id: str
    driver: str | None
    lost: bool


def pci_gpus(root: Path = Path("/")) -> tuple[PciGpu, ...]:
    """Return NVIDIA's GPUs on the PCI bus, with any driver."""
    folders = sorted((root / PCI_DEVICES.lstrip("/")).glob("*"))
    return tuple(
        PciGpu(folder.name, _link(folder / "driver"), _is_lost(folder / "config"))
        for folder in folders
        if read_text(folder / "vendor").strip() == _NVIDIA
        and read_text(folder / "class").startswith(_GPU_CLASSES)
    )


def _link(path: Path) -> str | None:
    try:
        return path.readlink().name
    except OSError:
        return None


def _is_lost(config: Path) -> bool:
    """Return whether a device reads as all ones, as it does once it is gone from the bus."""
    try:
        with config.open("rb") as file:
            return file.read(_CONFIG_BYTES) == b"\xff" * _CONFIG_BYTES
    except OSError:
        return False


class Fabric(NamedTuple):
    """``state``: NVML_GPU_FABRIC_STATE_*; ``status``: NVML return code of the registration.

    ``health``: bits of NVML_GPU_FABRIC_HEALTH_MASK_*, 0 from old drivers.
    """

    state: int
    status: int
    health: int = 0


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one GPU; unanswered ones are absent.

    ``waiting_for`` is the unanswered request of a GPU that hangs, ``code`` the NVML return code of
    an unreadable GPU. ``info`` has uuid, name and the labels of warpwatch_device_info. ``values``
    are by metric without its prefix and labels, "nvlink_link_up 3". ``pending`` has the settings
    MIG and ECC after a reset. ``gpm`` is the NVML return code of taking a sample, None without GPM.
    """

    index: int
    waiting_for: str | None = None
    code: int | None = None
    info: dict[str, str] = {}
    values: dict[str, float] = {}
    pending: dict[str, int] = {}
    mig_devices: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    fabric: Fabric | None = None
    gpm: int | None = None

    @property
    def up(self) -> bool:
        return self.waiting_for is None and self.code is None

    @property
    def name(self) -> str:
        return self.info.get("name", "")

    @property
    def address(self) -> str:
        """The PCI address as sysfs spells it, ``0000:1b:00.0``; empty if unknown."""
        domain, _, rest = self.info.get("pci_bus_id", "").partition(":")
        return f"{int(domain, 16):04x}:{rest.lower()}" if rest else ""

    def value(self, *key: str) -> float | None:
        return self.values.get(" ".join(key))

    @property
    def links(self) -> dict[int, bool]:
        """Whether each NVLink is up."""
        keys = (key.partition(" ") for key in self.values if key.startswith("nvlink_link_up "))
        return {int(link): bool(self.value(name, link)) for name, _, link in keys}


class GpuPair(msgspec.Struct, frozen=True):
    """Two GPUs, the lower index first. peer_access: NVML_P2P_STATUS_*, if answered."""

    gpus: tuple[int, int]
    peer_access: int | None = None


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of the driver.

    code: NVML return code of the initialization, None while it is outstanding; error: its text.
    count_code: NVML return code of counting the GPUs if that failed.
    crashed_by: the signal that ended the child. failure: its exit status and last line of stderr if
        it failed by itself.
    patience_s: how long the child may be silent.
    """

    patience_s: float = DEFAULT_PATIENCE_S
    asked: bool = True
    code: int | None = None
    error: str = ""
    crashed_by: int | None = None
    failure: str = ""
    library: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: int | None = None
    count: int | None = None
    count_code: int | None = None
    gpus: tuple[GpuReading, ...] = ()
    pairs: tuple[GpuPair, ...] = ()

    @property
    def started(self) -> bool:
        return self.code == int(pynvml.NVML_SUCCESS)

    @property
    def up(self) -> tuple[GpuReading, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.up)


def read(fd: int, timeout_s: float | None) -> bytes | None:
    """Return what the child has written, b"" at its end, or None after a silence of this time."""
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    return os.read(fd, 1 << 16) if ready.poll(timeout_s and 1000 * timeout_s) else None


def survey(
    patience_s: float = DEFAULT_PATIENCE_S,
    read: Callable[[int, float | None], bytes | None] = read,
) -> Survey:
    """Read all GPUs; a call counts as stuck once the child was silent for ``patience_s``.

    Raises WarpwatchError if no child can be started.
    """
    command, nothing = [sys.executable, *COMMAND], subprocess.DEVNULL
    try:
        errors = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the output
        child = subprocess.Popen(command, stdin=nothing, stdout=subprocess.PIPE, stderr=errors)
    except OSError as error:
        raise WarpwatchError(f"cannot start {sys.executable}: {error.strerror}") from error
    assert child.stdout is not None
    with child.stdout as output, errors:
        lines, is_silent = _listen(partial(read, output.fileno()), patience_s)
        if is_silent:
            child.kill()
        # A child that hangs inside the kernel survives even this; it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_EXIT_TIMEOUT_S)
        code = 0 if is_silent else child.returncode or 0
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    crashed_by = -code if code < 0 else None
    failure = f"status {code}: {last}" if code > 0 else ""
    return _assemble(lines, patience_s=patience_s, crashed_by=crashed_by, failure=failure)


def _listen(
    read: Callable[[float | None], bytes | None], patience_s: float
) -> tuple[list[Any], bool]:
    """Return the child's lines, and whether it fell silent before its end."""
    lines: list[Any] = []
    # The first line comes before the child calls the driver, however slowly it starts.
    timeout_s = None
    rest = b""
    while (data := read(timeout_s)) is not None:
        if not data:
            return lines, False
        *complete, rest = (rest + data).split(b"\n")
        lines += map(msgspec.json.decode, complete)
        timeout_s = patience_s
    return lines, True


def _assemble(lines: list[Any], **ended: Any) -> Survey:
    answers: dict[str, Any] = {}
    gpus: dict[int, dict[str, Any]] = {}
    pairs = []
    for line in lines:
        if "gpus" in line:
            pairs.append(line)
        elif "index" in line:
            gpus.setdefault(line["index"], {}).update(line)
        else:
            answers |= line
    unasked = {i: {"index": i, "waiting_for": "handle"} for i in range(answers.get("count") or 0)}
    ordered = [gpu for _, gpu in sorted((unasked | gpus).items())]
    facts = ended | {"gpus": ordered, "pairs": pairs}
    return msgspec.convert(answers | facts, Survey, strict=False, str_keys=True)


def _report(**facts: Any) -> None:
    line = msgspec.json.encode(facts) + b"\n"
    with _OUTPUT:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


class _Interview:
    """Reads one GPU, then each pair of it and a GPU in ``answered``, which has their handles."""

    def __init__(self, index: int, answered: dict[int, Any]) -> None:
        self._index = index
        self._answered = answered
        self._costs = CallCosts()

    def run(self) -> None:
        try:
            handle = self._ask("handle", pynvml.nvmlDeviceGetHandleByIndex, self._index)
            self._read(handle)
            self._read_pairs(handle)
        except (pynvml.NVMLError, library.DeviceGone, library.LibraryGone) as error:
            _report(index=self._index, code=_return_code(error))
        _report(index=self._index, waiting_for=None)

    def _ask(self, subject: str, call: Callable[..., Any], *arguments: Any) -> Any:
        _report(index=self._index, waiting_for=subject)
        return call(*arguments)

    def _read(self, handle: Any) -> None:
        uuid, name = self._ask("name", identify, handle, self._costs)
        info = {"uuid": uuid, "name": name}
        _report(index=self._index, info=info)
        info |= self._ask("facts", read_facts, handle, self._costs)
        _report(index=self._index, info=info)
        values = self._read_values(handle, info.get("driver_version", ""))
        named = {" ".join((metric.removeprefix("device_"), *own)): value
                 for (metric, own), value in values.items()}  # fmt: skip
        _report(index=self._index, values=named)
        for subject, call in _MORE.items():
            self._report_answer(subject, call, handle)

    def _read_values(self, handle: Any, driver_version: str) -> Values:
        """Return what the agent's own readers give."""
        readers, lacks = readers_of(driver_version, fans=0)
        reported = (self._reported(reader) for reader in readers)
        schedule = ReaderSchedule(reported, 0, self._costs, lacks, set(), interval_s=1.0)
        return schedule.read(handle)

    def _reported(self, reader: TimedReader) -> TimedReader:
        reader.read = partial(self._ask, reader.name, reader.read)
        return reader

    def _report_answer(self, subject: str, call: Callable[[Any], Any], handle: Any) -> None:
        try:
            _report(index=self._index, **{subject: self._ask(subject, call, handle)})
        except pynvml.NVMLError as error:
            library.classify(error)

    def _read_pairs(self, handle: Any) -> None:
        with _ANSWERED:
            earlier = list(self._answered.items())
            self._answered[self._index] = handle
        for peer, other in earlier:
            pair = partial(self._ask, "a pair of GPUs")
            access = _or_none(pair, pynvml.nvmlDeviceGetP2PStatus, handle, other, _P2P_READ)
            _report(gpus=sorted((self._index, peer)), peer_access=access)


def _return_code(error: Exception) -> int:
    if str(error) == "no_permission":
        return int(pynvml.NVML_ERROR_NO_PERMISSION)
    return library.code_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)


def _or_none(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        library.classify(error)
        return None


def _pending(handle: Any) -> dict[str, int]:
    settings = {"MIG": pynvml.nvmlDeviceGetMigMode, "ECC": pynvml.nvmlDeviceGetEccMode}
    modes = {name: _or_none(call, handle) for name, call in settings.items()}
    return {name: mode[1] for name, mode in modes.items() if mode}


def _mig_devices(handle: Any) -> list[str]:
    names = []
    for slot in range(min(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle), _MAX_MIG_DEVICES)):
        # Slots are sparse.
        with contextlib.suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            names.append(str(pynvml.nvmlDeviceGetName(device)))
    return names


def _processes(handle: Any) -> list[int]:
    return [process.pid for process in ProcessList(COMPUTE).read(handle)]


def _fabric(handle: Any) -> Fabric:
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except pynvml.NVMLError_FunctionNotFound:
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return Fabric(info.state, info.status, getattr(info, "healthMask", 0))


def _gpm(handle: Any) -> int | None:
    """Take a sample: the only sure way to learn whether this user may."""
    if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
        return None
    if not _GPM.acquire(timeout=_GPM_TIMEOUT_S):
        return int(pynvml.NVML_ERROR_TIMEOUT)
    try:
        sample = pynvml.nvmlGpmSampleAlloc()
        try:
            pynvml.nvmlGpmSampleGet(handle, sample)
        finally:
            pynvml.nvmlGpmSampleFree(sample)
    except pynvml.NVMLError as error:
        return library.code_of(error)
    finally:
        _GPM.release()
    return int(pynvml.NVML_SUCCESS)


# Facts that no sample has.
_MORE: dict[str, Callable[[Any], Any]] = {
    "pending": _pending,
    "mig_devices": _mig_devices,
    "processes": _processes,
    "fabric": _fabric,
    "gpm": _gpm,
}


def _library_file() -> str | None:
    """Return the file from which NVML was loaded, as the kernel names it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and "libnvidia-ml" in path[0]:
            return path[0]
    return None


def main() -> None:
    _report()
    try:
        library.initialise()
    except library.NvmlUnavailable as error:
        code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        if isinstance(error.__cause__, pynvml.NVMLError):
            code = library.code_of(error.__cause__)
        _report(library=_library_file(), code=code, error=str(error))
        return
    _report(library=_library_file(), code=pynvml.NVML_SUCCESS)
    _report(
        driver_version=_or_none(pynvml.nvmlSystemGetDriverVersion),
        nvml_version=_or_none(pynvml.nvmlSystemGetNVMLVersion),
        cuda_version=_or_none(pynvml.nvmlSystemGetCudaDriverVersion),
    )
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        _report(count_code=library.code_of(error))
        return
    _report(count=count)
    answered: dict[int, Any] = {}
    gpus = range(min(count, MAX_THREADS))
    run_all({f"gpu-{index}": _Interview(index, answered).run for index in gpus})


if __name__ == "__main__":
    main()
    # A driver whose shutdown hangs must not delay the exit.
    os._exit(0)
