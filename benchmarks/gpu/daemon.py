"""Checks `warpwatch doctor`, the cost of the daemon at one sample per second and of its NVML calls.

The calls are made by root and by an ordinary user, with the driver's return codes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pynvml

from benchmarks.gpu.runner import CannotCheck, Report
from benchmarks.processes import (
    MAX_RSS_MIB,
    Scraper,
    at_most,
    burst,
    clean_environment,
    core_percents,
    each_second,
    last_line,
    latency,
    rss_mib,
    running_daemon,
    scrape_limits,
    wait_until,
)
from warpwatch_devices.nvml.counters import Integral, busy_samples, energy_samples
from warpwatch_devices.nvml.fields import TimedReader
from warpwatch_devices.nvml.gpm import GpmRequest
from warpwatch_devices.nvml.library import code_of, initialise, name_of, shut_down
from warpwatch_devices.nvml.readers import readers_of

DOCTOR = (sys.executable, "-m", "warpwatch_daemon", "doctor", "--json")
DOCTOR_TIMEOUT_S = 25.0
MAX_CORE_PERCENT = 0.5
# Start-up is not part of the cost of a sample.
SETTLE_S, QUICK_SETTLE_S = 6.0, 0.5
WINDOW_S, QUICK_WINDOW_S = 30, 1
SCRAPES, QUICK_SCRAPES = 300, 10


def check_doctor(report: Report) -> None:
    with report.part("doctor") as figures:
        done = subprocess.run(
            DOCTOR,
            capture_output=True,
            text=True,
            timeout=DOCTOR_TIMEOUT_S,
            env=clean_environment(),
        )
        # Status 1: the doctor works and finds a fault of this machine.
        if done.returncode not in (0, 1):
            raise RuntimeError(f"exit {done.returncode}: {last_line(done.stderr)}")
        figures["checks"] = json.loads(done.stdout)
        wrong = [one for one in figures["checks"] if one["ok"] is False]
        report.expect(True, f"{len(figures['checks'])} checks, {len(wrong)} find something wrong")
        for one in wrong:
            report.fact(f"{one['name']}: {one['detail']}"[:200])


def check_footprint(report: Report) -> None:
    quick = report.setting.quick
    with report.part("daemon") as figures, running_daemon() as daemon:
        wait_until(lambda: daemon.devices())
        time.sleep(QUICK_SETTLE_S if quick else SETTLE_S)
        limits = []
        with Scraper(daemon.port, gzip=True) as scraper:
            modes: dict[str, dict[str, Scraper]] = {"idle": {}, "scraped": {"daemon": scraper}}
            for mode, scrapers in modes.items():
                window_s = QUICK_WINDOW_S if quick else WINDOW_S
                wait = partial(each_second, scrapers, window_s, {"daemon": []})
                percent = round(core_percents({mode: daemon.pid}, wait)[mode], 3)
                limits.append(at_most(f"percent of a core, {mode}", percent, MAX_CORE_PERCENT))
            times_s = burst(scraper, QUICK_SCRAPES if quick else SCRAPES)
        limits.append(at_most("RSS in MiB", rss_mib(daemon.pid), MAX_RSS_MIB))
        figures["limits"] = [*limits, *scrape_limits("of this node", latency(times_s))]
        for row in figures["limits"]:
            text = f"{row['what']}: {row['value']}, at most {row['at_most']}"
            report.expect(row["met"], text, timed=True)


# --- the NVML calls ---

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
