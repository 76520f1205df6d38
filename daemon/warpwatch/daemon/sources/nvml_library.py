"""The seam to NVML: finding the library, and what each return code means for us.

The policy follows nvml.h's description of its return codes. What is not supported stays so until
the device or the driver changes; what is lost is left alone; what is unknown concerns one value.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from enum import Enum

import pynvml

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_ENV = "WARPWATCH_NVML_LIBRARY"


class Meaning(Enum):
    """What a return code says, by what is to be done."""

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


class NvmlUnavailable(Exception):
    """NVML cannot be used now; the text says in one line what is missing."""


def meaning_of(code: int) -> Meaning:
    return _MEANINGS.get(code, Meaning.UNKNOWN)


def code_of(error: Exception) -> int:
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def initialise() -> None:
    """Load and initialise NVML. May be called again after it failed: nothing is remembered.

    The library is the file that WARPWATCH_NVML_LIBRARY names, else the loader's search.
    Raises NvmlUnavailable.
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
        raise NvmlUnavailable(f"NVML does not start: {error}") from error


def shut_down() -> None:
    """Give up the library's generation; it can be initialised again."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
