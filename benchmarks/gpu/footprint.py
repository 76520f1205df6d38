"""What the daemon costs at one sample a second on the real driver."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.gpu.readers import devices_of
from benchmarks.gpu.report import Report
from benchmarks.limits import MAX_RSS_MIB, at_most, scrape_limits
from benchmarks.node import running_daemon
from benchmarks.processes import core_percents, memory, wait_until
from benchmarks.scraping import Scraper, burst, each_second, latency

MAX_CORE_PERCENT = 0.5
# Start-up is not the price of a sample.
SETTLE_S, QUICK_SETTLE_S = 6.0, 0.5
WINDOW_S, QUICK_WINDOW_S = 30, 1
SCRAPES, QUICK_SCRAPES = 300, 10


def check(report: Report) -> None:
    quick = report.setting.quick
    with report.part("daemon") as figures, running_daemon() as daemon:
        wait_until(lambda: devices_of(daemon))
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
        limits.append(at_most("RSS in MiB", memory(daemon.pid).rss_mib, MAX_RSS_MIB))
        figures["limits"] = [*limits, *scrape_limits("of this node", latency(times_s))]
        for row in figures["limits"]:
            text = f"{row['what']}: {row['value']}, at most {row['at_most']}"
            report.expect(row["met"], text, timed=True)
