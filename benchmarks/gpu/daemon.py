"""Checks `warpwatch doctor`, and what the daemon costs at one sample per second."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

from benchmarks.gpu.report import Report
from benchmarks.processes import (
    MAX_RSS_MIB,
    at_most,
    clean_environment,
    core_percents,
    last_line,
    rss_mib,
    running_daemon,
    scrape_limits,
    wait_until,
)
from benchmarks.scraping import Scraper, burst, each_second, latency

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
