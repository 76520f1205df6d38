"""Loads NVML, gives each return code its meaning, counts the cost of calls, describes devices.

The policy follows nvml.h's description of its return codes. A value that is not supported stays so
until the device or the driver changes. A lost device is left alone. An unknown code concerns one
value.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from warpwatch_devices.memory_groups import read_text

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_ENV = "WARPWATCH_NVML_LIBRARY"


class Meaning(Enum):
    """The reaction to a return code."""

    UNSUPPORTED = "the device will never answer this: do not ask again"
    NO_PERMISSION = "this process may not ask: do not ask again soon"
    EMPTY = "nothing there now"
    LIBRARY = "the library must be initialised again"
    LOST = "the device is gone: stop calling it"
    RESET_REQUIRED = "the device must be reset: stop calling it"
    UNKNOWN = "this value could not be read"


_MEANINGS: dict[int, Meaning] = {
    pynvml.NVML_ERROR_UNINITIALIZED: Meaning.LIBRARY,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: Meaning.UNSUPPORTED,
    pynvml.NVML_ERROR_NOT_SUPPORTED: Meaning.UNSUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: Meaning.NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND: Meaning.EMPTY,
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: Meaning.EMPTY,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Meaning.LIBRARY,
    pynvml.NVML_ERROR_TIMEOUT: Meaning.EMPTY,
    pynvml.NVML_ERROR_IRQ_ISSUE: Meaning.LOST,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Meaning.UNSUPPORTED,
    pynvml.NVML_ERROR_GPU_IS_LOST: Meaning.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Meaning.RESET_REQUIRED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Meaning.LIBRARY,
    pynvml.NVML_ERROR_NO_DATA: Meaning.EMPTY,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: Meaning.UNSUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: Meaning.UNSUPPORTED,
    pynvml.NVML_ERROR_NOT_READY: Meaning.EMPTY,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Meaning.LOST,
}


# The published reason of a device that is gone.
_REASONS = {
    Meaning.LOST: "lost",
    Meaning.RESET_REQUIRED: "reset_required",
    Meaning.NO_PERMISSION: "no_permission",
}
_CODE_NAMES: dict[int, str] = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}


class NvmlUnavailable(Exception):
    """Raised with one line if NVML cannot be used now."""


class VersionMismatch(NvmlUnavailable):
    """Raised if library and kernel module have different driver versions."""


class DeviceGone(Exception):
    """Raised with the published reason if a device cannot be read."""


class LibraryGone(Exception):
    """Raised if NVML must be initialised again."""


def meaning_of(code: int) -> Meaning:
    return _MEANINGS.get(code, Meaning.UNKNOWN)


def code_of(error: Exception) -> int:
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def name_of(code: int) -> str:
    """Return a return code as a label value: ``gpu_is_lost``."""
    return _CODE_NAMES.get(code, str(code))


def reason_of(meaning: Meaning) -> str:
    """Return the published reason for calls that end with ``meaning``."""
    return _REASONS.get(meaning, "driver")


def classify(error: pynvml.NVMLError) -> Meaning:
    """Return the meaning of an error that concerns one value. Raises LibraryGone, DeviceGone."""
    meaning = meaning_of(code_of(error))
    if meaning is Meaning.LIBRARY:
        raise LibraryGone from error
    if meaning in (Meaning.LOST, Meaning.RESET_REQUIRED):
        raise DeviceGone(reason_of(meaning)) from error
    return meaning


def function(name: str) -> Callable[..., int]:
    """Return the library's own function, for calls that pynvml's wrappers make expensive.

    Raises NVMLError if the library lacks it.
    """
    pointer: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
    return pointer


def initialise() -> None:
    """Load and initialise NVML; may be repeated after a failure.

    The library is the file that WARPWATCH_NVML_LIBRARY names, else the loader's search. Raises
    NvmlUnavailable; VersionMismatch if the kernel module has another version.
    """
    path = os.environ.get(LIBRARY_ENV) or LIBRARY
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NvmlUnavailable(
            f"{path} not found: install the NVIDIA driver, or name the file in {LIBRARY_ENV}"
            f" ({error})"
        ) from error
    if path != LIBRARY:
        # pynvml asks the loader for the usual name, which this file need not have.
        pynvml.nvmlLib = library
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _unavailable("NVML does not start", error) from error


def count_devices() -> int:
    """Return the number of devices. Raises NvmlUnavailable and VersionMismatch.

    The initialisation of a library in use only counts, so this may be the first call to meet a
    replaced driver.
    """
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        raise _unavailable("NVML does not count devices", error) from error


def _unavailable(what: str, error: pynvml.NVMLError) -> NvmlUnavailable:
    if code_of(error) != pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return NvmlUnavailable(f"{what}: {error}")
    return VersionMismatch(f"{what}: kernel module and library are of different driver versions")


def shut_down() -> None:
    """Undo one initialisation; after the last one the next is a real one."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


T = TypeVar("T")

# Codes that are not counted as errors.
_ANSWERS = (Meaning.UNSUPPORTED, Meaning.EMPTY)


class CallCosts:
    """The calls, seconds and errors of one device, by reader.

    Its loop adds; only the manager drains.
    """

    def __init__(self) -> None:
        self.errors = 0
        # By name and labels of the agent's own counters.
        self._totals: dict[tuple[str, ...], float] = {}
        self._drained: dict[tuple[str, ...], float] = {}

    def add(self, reader: str, calls: int, seconds: float) -> None:
        self._add(calls, "nvml_calls_total", reader)
        self._add(seconds, "nvml_call_seconds_total", reader)

    def add_error(self, reader: str, code: int) -> None:
        if meaning_of(code) not in _ANSWERS:
            self.errors += 1
            self._add(1, "nvml_errors_total", reader, name_of(code))

    def _add(self, by: float, *counter: str) -> None:
        self._totals[counter] = self._totals.get(counter, 0.0) + by

    def measure(self, reader: str, call: Callable[..., T], *arguments: Any) -> T:
        """Return ``call(*arguments)``, counted for the reader. Raises NVMLError."""
        try:
            return self.time(reader, call, *arguments)
        except pynvml.NVMLError as error:
            self.add_error(reader, code_of(error))
            raise

    def time(self, reader: str, call: Callable[..., T], *arguments: Any) -> T:
        """Return ``call(*arguments)``, timed, without counting an error."""
        begun = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.add(reader, 1, time.perf_counter() - begun)

    def drain(self, count: Callable[..., None]) -> None:
        """Add the growth to the agent's own counters (``Sink.count``)."""
        for counter, total in tuple(self._totals.items()):
            new = total - self._drained.get(counter, 0.0)
            if new:
                count(*counter, by=new)
                self._drained[counter] = total


# How often a list may grow between two calls.
_ATTEMPTS = 4


class Buffer:
    """Memory for the structs that NVML fills; it grows until they fit into one call."""

    def __init__(self, layout: struct.Struct, capacity: int = 32) -> None:
        self._layout = layout
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._bytes = bytearray(capacity * self._layout.size)
        self._pointer = (ctypes.c_char * len(self._bytes)).from_buffer(self._bytes)

    def fill(self, call: Callable[[Any, Any], int]) -> Iterable[tuple[int, ...]]:
        """Return the structs that ``call(structs, count)`` writes. Raises NVMLError."""
        code = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
        for _ in range(_ATTEMPTS):
            count = ctypes.c_uint(self._capacity)
            code = call(self._pointer, ctypes.byref(count))
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            self._grow(max(2 * self._capacity, count.value + 8))
        if code != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(code)
        return self._layout.iter_unpack(self._bytes[: count.value * self._layout.size])


_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_KEPLER: "Kepler",
    pynvml.NVML_DEVICE_ARCH_MAXWELL: "Maxwell",
    pynvml.NVML_DEVICE_ARCH_PASCAL: "Pascal",
    pynvml.NVML_DEVICE_ARCH_VOLTA: "Volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "Turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "Ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "Ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "Hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "Blackwell",
}
# By its label in warpwatch_device_info; container runtimes name devices by the minor number.
_FACTS: dict[str, Callable[[Any], str]] = {
    "driver_version": lambda handle: pynvml.nvmlSystemGetDriverVersion(),
    "pci_bus_id": lambda handle: pynvml.nvmlDeviceGetPciInfo_v3(handle).busId,
    "vbios_version": lambda handle: pynvml.nvmlDeviceGetVbiosVersion(handle),
    "serial": lambda handle: pynvml.nvmlDeviceGetSerial(handle),
    "minor_number": lambda handle: str(pynvml.nvmlDeviceGetMinorNumber(handle)),
    "architecture": lambda handle: _ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle), ""),
}
_ACCOUNT = "facts"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MODULE = Path("/sys/module/nvidia")


def identify(handle: Any, costs: CallCosts) -> tuple[str, str]:
    """Return UUID and name. Raises NVMLError."""
    uuid: str = costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetUUID, handle)
    name: str = costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetName, handle)
    return uuid, name


def driver_load(boot_id: Path = _BOOT_ID, module: Path = _MODULE) -> str:
    """Return what differs after a reboot and after the driver was loaded again, "" if unknown.

    The kernel gives the folder of a module a new inode number whenever the module is loaded.
    """
    boot = read_text(boot_id).strip()
    try:
        return f"{boot}/{module.stat().st_ino}" if boot else ""
    except OSError:
        return boot


def read_facts(handle: Any, costs: CallCosts) -> dict[str, str]:
    """Return the labels that describe the device; unreadable ones are missing.

    Raises LibraryGone, DeviceGone.
    """
    facts = {"driver_load": load} if (load := driver_load()) else {}
    for name, read in _FACTS.items():
        try:
            text = str(costs.measure(_ACCOUNT, read, handle))
        except pynvml.NVMLError as error:
            classify(error)
            continue
        except UnicodeDecodeError:
            continue
        if text:
            facts[name] = text
    return facts


def count_fans(handle: Any, costs: CallCosts) -> int:
    """Return the number of fans. Raises LibraryGone, DeviceGone."""
    try:
        return int(costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetNumFans, handle))
    except pynvml.NVMLError as error:
        classify(error)
        return 0
