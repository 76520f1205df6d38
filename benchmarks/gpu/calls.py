"""Checks the cost of each NVML reader and the driver's return codes, as root and as a user."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pynvml

from benchmarks.gpu.report import CannotCheck, Report
from warpwatch_devices.nvml.gpm import GpmRequest
from warpwatch_devices.nvml.library import code_of, initialise, name_of, shut_down
from warpwatch_devices.nvml.readers import readers_of
from warpwatch_devices.nvml.sample_buffers import Integral, busy_samples, energy_samples
from warpwatch_devices.nvml.tiers import TimedReader

COUNT, QUICK_COUNT = 200, 5
DEAR_US = 1000.0
UNPRIVILEGED = 65534
# The driver refreshes GPM's counters every 100 ms.
GPM_WINDOW_S = 0.15
PR_SET_DUMPABLE = 4
SUCCESS = "success"


def check_calls(report: Report) -> None:
    # This part comes first: once NVML is loaded, it would not survive the fork.
    with report.part("ordinary_user") as figures:
        if os.geteuid() != 0:
            raise CannotCheck(f"not root (uid {os.geteuid()}): there are no privileges to drop")
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(1, mp_context=fork, initializer=_drop_privileges) as child:
            figures |= child.submit(query, 1).result()
        _report_codes(report, "an ordinary user", figures)
    with report.part("readers") as figures:
        figures |= query(QUICK_COUNT if report.setting.quick else COUNT)
        _report_codes(report, "this user", figures)
        for reader in figures["readers"]:
            if reader.get("p99_us", 0.0) > DEAR_US:
                report.fact("dear: {reader}: p50 {p50_us} µs, p99 {p99_us} µs".format(**reader))


def _drop_privileges() -> None:
    os.setgroups([])
    os.setgid(UNPRIVILEGED)
    os.setuid(UNPRIVILEGED)
    # After a change of user the kernel hides /proc/self, which some drivers read.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


@contextlib.contextmanager
def first_gpu() -> Iterator[Any]:
    """Yield the handle of index 0. Raises NvmlUnavailable, NVMLError."""
    initialise()
    try:
        yield pynvml.nvmlDeviceGetHandleByIndex(0)
    finally:
        shut_down()


def query(count: int) -> dict[str, Any]:
    """Time each reader ``count`` times and return the codes of our GPM metrics."""
    with first_gpu() as handle:
        samples = busy_samples(Integral()).read, energy_samples(Integral()).read
        ours, _ = readers_of(str(pynvml.nvmlSystemGetDriverVersion()), 1, *samples)
        readers = [time_reader(reader, handle, count) for reader in ours]
        return {"readers": readers, "gpm": gpm_codes(handle)}


def time_reader(reader: TimedReader, handle: Any, count: int) -> dict[str, Any]:
    """Return a reader's times with ctypes included, or the return code of its failure."""
    row: dict[str, Any] = {"reader": reader.name, "code": SUCCESS}
    times_us = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            values = reader.read(handle)
            times_us.append(round((time.perf_counter() - began) * 1e6, 1))
    except pynvml.NVMLError as error:
        return row | {"code": name_of(code_of(error))}
    times_us.sort()
    row |= {"p50_us": statistics.median(times_us), "max_us": times_us[-1]}
    return row | {"p99_us": times_us[int(0.99 * count)], "series": [name for name, _ in values]}


def gpm_codes(handle: Any) -> dict[int, str]:
    """Return the code of each metric over one window; one code for all without GPM."""
    samples = []
    try:
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return {0: "not_supported"}
        for _ in range(2):
            samples.append(pynvml.nvmlGpmSampleAlloc())
            pynvml.nvmlGpmSampleGet(handle, samples[-1])
            time.sleep(GPM_WINDOW_S)
        request = GpmRequest()
        pynvml.nvmlGpmMetricsGet(request.between(*samples))
        return {n: name_of(code) if code else SUCCESS for n, code, _ in request.answers()}
    except pynvml.NVMLError as error:
        return {0: name_of(code_of(error))}
    finally:
        for sample in samples:
            pynvml.nvmlGpmSampleFree(sample)


def _report_codes(report: Report, user: str, figures: dict[str, Any]) -> None:
    readers, metrics = figures["readers"], list(figures["gpm"].values())
    good = [reader for reader in readers if reader["code"] == SUCCESS]
    report.expect(bool(good), f"{len(good)} of {len(readers)} readers answer {user}")
    for code in sorted({reader["code"] for reader in readers} - {SUCCESS}):
        names = sorted({reader["reader"] for reader in readers if reader["code"] == code})
        report.fact(f"{code} for {user}: {', '.join(names)}")
    answers = ", ".join(f"{metrics.count(code)} {code}" for code in sorted({*metrics}))
    report.fact(f"GPM metrics for {user}: {answers}")
