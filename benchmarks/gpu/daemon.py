"""Checks what the daemon costs at one sample per second, and each of its NVML calls."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

import pynvml

from benchmarks.gpu.runner import Report
from benchmarks.processes import (
    MAX_RSS_MIB,
    Scraper,
    at_most,
    burst,
    core_percents,
    each_second,
    latency,
    rss_mib,
    running_daemon,
    scrape_limits,
    wait_until,
)
from warpwatch_devices.nvml.counters import Integral, busy_samples, energy_samples
from warpwatch_devices.nvml.fields import TimedReader
from warpwatch_devices.nvml.gpm import GpmRequest
from warpwatch_devices.nvml.library import code_of, initialise, name_of
from warpwatch_devices.nvml.readers import readers_of

MAX_CORE_PERCENT = 0.5
# Start-up is not part of the cost of a sample.
SETTLE_S, QUICK_SETTLE_S = 6.0, 0.5
WINDOW_S, QUICK_WINDOW_S = 30, 1
SCRAPES, QUICK_SCRAPES = 300, 10


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
# The driver refreshes GPM's counters every 100 ms.
GPM_WINDOW_S = 0.15
SUCCESS = "success"


def check_calls(report: Report) -> None:
    with report.part("readers") as figures:
        initialise()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        buffers = busy_samples(Integral()).read, energy_samples(Integral()).read
        readers, _ = readers_of(str(pynvml.nvmlSystemGetDriverVersion()), 1, *buffers)
        count = QUICK_COUNT if report.setting.quick else COUNT
        rows = figures["readers"] = [time_reader(reader, handle, count) for reader in readers]
        codes = Counter(row["code"] for row in rows)
        text = f"{codes[SUCCESS]} of {len(rows)} readers answer uid {os.geteuid()}"
        report.expect(codes[SUCCESS] > 0, text)
        for code in codes.keys() - {SUCCESS}:
            names = [row["reader"] for row in rows if row["code"] == code]
            report.fact(f"{code}: {', '.join(sorted(names))}")
        for row in rows:
            if row.get("p99_us", 0.0) > DEAR_US:
                report.fact("dear: {reader}: p50 {p50_us} µs, p99 {p99_us} µs".format(**row))
        figures["gpm"] = gpm_codes(handle)
        answers = Counter(figures["gpm"].values()).items()
        report.fact(f"GPM metrics: {', '.join(f'{number} {code}' for code, number in answers)}")


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
