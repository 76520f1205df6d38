"""Asking NVML, in a process that may be given up: `python -m warpwatch_daemon.doctor.interview`.

Every answer is one line of JSON on stdout as soon as it is there:
``{"device": 3, "question": "name", "code": 0, "value": "NVIDIA H100"}``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from warpwatch_daemon.doctor.questions import QUESTIONS
from warpwatch_devices.nvml import library
from warpwatch_runtime.call_guard import MAX_THREADS, run_all

# pynvml writes NVML_P2P_CAPS_INDEX_READ as a tuple.
_P2P_READ = 0
_PRINTING = threading.Lock()


def report(device: int | None, question: str, code: int, value: Any = None) -> None:
    line = json.dumps({"device": device, "question": question, "code": code, "value": value})
    with _PRINTING:
        print(line, flush=True)  # noqa: T201


def ask(device: int | None, question: str, call: Callable[[], Any]) -> Any:
    """Report the answer of one call; returns it too, None without one."""
    try:
        value = call()
    except pynvml.NVMLError as error:
        report(device, question, library.code_of(error), str(error))
        return None
    report(device, question, pynvml.NVML_SUCCESS, value)
    return value


class Interview:
    """Asks every GPU in a thread of its own, and about each pair once both have answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered: dict[int, Any] = {}

    def run(self, count: int) -> None:
        gpus = range(min(count, MAX_THREADS))
        run_all({f"gpu-{index}": partial(self._device, index) for index in gpus})

    def _device(self, index: int) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            report(index, "handle", library.code_of(error), str(error))
        else:
            for question, call in QUESTIONS.items():
                ask(index, question, lambda call=call: call(handle))  # type: ignore[misc]
            for peer, other in self._earlier(index, handle):
                self._ask_pair(index, handle, peer, other)
        report(index, "done", pynvml.NVML_SUCCESS)

    def _earlier(self, index: int, handle: Any) -> Iterator[tuple[int, Any]]:
        with self._lock:
            earlier = list(self._answered.items())
            self._answered[index] = handle
        yield from earlier

    def _ask_pair(self, index: int, handle: Any, peer: int, other: Any) -> None:
        ask(
            index,
            f"ancestor {peer}",
            lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other),
        )
        ask(
            index,
            f"peer access {peer}",
            lambda: pynvml.nvmlDeviceGetP2PStatus(handle, other, _P2P_READ),
        )


def library_file() -> str | None:
    """The file from which NVML was loaded, as the kernel names it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and "libnvidia-ml" in path[0]:
            return path[0]
    return None


def main() -> None:
    report(None, "begun", pynvml.NVML_SUCCESS)
    error: library.NvmlUnavailable | None = None
    try:
        library.initialise()
    except library.NvmlUnavailable as unavailable:
        error = unavailable
    report(None, "library", pynvml.NVML_SUCCESS, library_file())
    if error:
        cause = error.__cause__
        missing = isinstance(cause, OSError) or cause is None
        absent = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        code = absent if missing else library.code_of(cause)  # type: ignore[arg-type]
        report(None, "initialise", code, str(error))
        return
    report(None, "initialise", pynvml.NVML_SUCCESS)
    ask(None, "driver_version", pynvml.nvmlSystemGetDriverVersion)
    ask(None, "nvml_version", pynvml.nvmlSystemGetNVMLVersion)
    ask(None, "cuda_version", pynvml.nvmlSystemGetCudaDriverVersion)
    Interview().run(ask(None, "count", pynvml.nvmlDeviceGetCount) or 0)


if __name__ == "__main__":
    main()
    # A driver whose shutdown hangs must not hold up the end.
    os._exit(0)
