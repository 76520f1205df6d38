"""The parts of the device benchmark that decide its figures."""

from benchmarks.devices import limits
from benchmarks.processes import latency, sample_count

PAGE = b"""# HELP up Whether.
# TYPE up gauge
up{gpu="0",uuid="GPU-a"} 1
power{hostname="h",index="1"} 3.5

# EOF
"""


def test_samples_and_latencies_are_counted():
    assert sample_count(PAGE) == 2
    found = latency([0.001] * 99 + [0.5])
    assert (found["p50_ms"], found["scrapes"]) == (1.0, 100)
    assert 1.0 < found["p99_ms"] < 500.0


def test_each_limit_is_judged():
    ours = {"calls_per_s_and_gpu": 11.0, "rss_mib": 65.0, "cpu_s_per_min": 0.5, "samples": 999}
    rows = limits({"0_us": {**ours, "scrape": {"p50_ms": 0.4, "p99_ms": 3.5}}})
    assert {row["what"]: (row["value"], row["met"]) for row in rows} == {
        "samples at 0_us": (999, False), "NVML calls a second and GPU at 0_us": (11.0, True),
        "CPU s a minute, scraped, at 0_us": (0.5, True), "RSS in MiB at 0_us": (65.0, False),
        "scrape p50 in ms at 0_us": (0.4, True), "scrape p99 in ms at 0_us": (3.5, False),
    }  # fmt: skip
