"""What each NVML call costs, which fields the driver answers, and what its sample buffers hold."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pynvml

from benchmarks.gpu import nvml
from benchmarks.gpu.call_table import SAMPLE_TYPES, calls
from benchmarks.gpu.check import Finding, Part, Setting, need_root
from warpwatch_devices.nvml.fields import RARE_FIELDS, SLOW_FIELDS, Field, fast_fields
from warpwatch_devices.nvml.gpm_metrics import SHARES, TRAFFIC

BATCH_SIZES = (1, 10, 40)
# As many as fill a round of the fast tier on hardware.
COUNT, DEAR_COUNT = 200, 20
# All field numbers of nvml.h so far are below.
LAST_FIELD = 320
DEAR_US = 1000.0
GPM_WINDOW_S = 0.15


def parts(setting: Setting) -> Iterator[Part]:
    counts = setting.count(COUNT, 5), setting.count(DEAR_COUNT, 2)
    # First, while this process has not loaded NVML: it would not survive a fork.
    yield Part("as_nobody", lambda: as_nobody(counts), nobody_findings)
    yield Part("calls", lambda: on_gpu(lambda h: time_calls(h, counts)), call_findings)
    yield Part("batches", lambda: on_gpu(lambda h: time_batches(h, counts)), batch_findings)
    yield Part("fields", lambda: on_gpu(each_field), field_findings)
    yield Part("samples", lambda: on_gpu(read_buffers), buffer_findings)
    yield Part("gpm", lambda: on_gpu(lambda h: time_gpm(h, counts)), gpm_findings)


def on_gpu(measure: Callable[[Any], Any]) -> Any:
    with nvml.first_gpu() as handle:
        return measure(handle)


# --- calls ---


def time_calls(handle: Any, counts: tuple[int, int]) -> dict[str, Any]:
    return {name: _timed(partial(call, handle), counts) for name, call in calls()}


def _timed(call: Callable[[], Any], counts: tuple[int, int]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        return {"code": "success", **nvml.time_call(call, *counts)}
    except pynvml.NVMLError as error:
        took_us = (time.perf_counter() - began) * 1e6
        return {"code": nvml.code_name(error), "first_us": round(took_us, 1)}


def call_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    good = {name: cost for name, cost in measured.items() if cost["code"] == "success"}
    median_us = statistics.median(cost["p50_us"] for cost in good.values())
    yield Finding(None, f"{len(good)} calls of {len(measured)} answer; median {median_us:.0f} µs")
    dear = {n: cost for n, cost in good.items() if cost["p99_us"] > DEAR_US}
    for name, cost in sorted(dear.items(), key=lambda item: -item[1]["p99_us"]):
        text = f"{name}: p50 {cost['p50_us']:.0f}, p99 {cost['p99_us']:.0f} µs"
        yield Finding(None, f"dear: {text}, max {cost['max_us']:.0f} µs")
    codes = sorted({cost["code"] for cost in measured.values()} - {"success"})
    for code in codes:
        names = [name for name, cost in measured.items() if cost["code"] == code]
        yield Finding(None, f"{code}: {', '.join(names)}")


# --- fields ---


def our_fields() -> list[Field]:
    version = str(pynvml.nvmlSystemGetDriverVersion())
    return [*fast_fields(version), *SLOW_FIELDS, *RARE_FIELDS]


def time_batches(handle: Any, counts: tuple[int, int]) -> dict[str, Any]:
    """Batches of the daemon's fields that the device supports, and of the fast tier's."""
    asked = [(field.number, field.scope) for field in our_fields()]
    answered = [
        pair
        for pair, answer in zip(asked, nvml.read_fields(handle, asked), strict=True)
        if answer["code"] == "success"
    ]
    batches = {f"supported_{size}": answered[:size] for size in BATCH_SIZES}
    fast = len(fast_fields(str(pynvml.nvmlSystemGetDriverVersion())))
    batches |= {"fast_tier": asked[:fast], "all": asked}
    return {
        name: {"fields": len(pairs), **_timed(_batch(handle, pairs), counts)}
        for name, pairs in batches.items()
    }


def _batch(handle: Any, pairs: list[tuple[int, int]]) -> Callable[[], Any]:
    return lambda: pynvml.nvmlDeviceGetFieldValues(handle, pairs)


def batch_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    for name, cost in measured.items():
        took = f"p50 {cost['p50_us']:.0f}, p99 {cost['p99_us']:.0f} µs" if "p50_us" in cost else ""
        yield Finding(None, f"batch {name} of {cost['fields']}: {cost['code']} {took}")


def each_field(handle: Any) -> dict[str, Any]:
    """Every number alone, twice: the second time tells what a reading costs."""
    scopes = {field.number: field.scope for field in our_fields()}
    found = []
    for number in range(1, LAST_FIELD):
        pair = (number, scopes.get(number, 0))
        try:
            nvml.read_fields(handle, [pair])
            began = time.perf_counter()
            answer = nvml.read_fields(handle, [pair])[0]
            answer["cost_us"] = round((time.perf_counter() - began) * 1e6, 1)
        except pynvml.NVMLError as error:
            answer = {"field": number, "code": "call:" + nvml.code_name(error)}
        found.append(answer)
    ours = sorted(scopes)
    return {"answers": found, "ours": ours}


def field_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    answers = {answer["field"]: answer for answer in measured["answers"]}
    good = [number for number, answer in answers.items() if answer["code"] == "success"]
    yield Finding(None, f"{len(good)} fields below {LAST_FIELD} answer: {spans(good)}")
    ours = [number for number in measured["ours"] if number not in good]
    yield Finding(None, f"of ours, not answered: {spans(ours)}")
    failing = [number for number, a in answers.items() if a["code"].startswith("call:")]
    yield Finding(None, f"fields that fail the whole call: {spans(failing)}")


def spans(numbers: list[int]) -> str:
    """``1-3, 7``"""
    texts: list[str] = []
    for number in sorted(numbers):
        first, _, last = texts[-1].partition("-") if texts else ("", "", "")
        if texts and int(last or first) == number - 1:
            texts[-1] = f"{first}-{number}"
        else:
            texts.append(str(number))
    return ", ".join(texts) or "none"


# --- the driver's sample buffers ---


def read_buffers(handle: Any) -> dict[str, Any]:
    return {name: _buffer(handle, kind) for name, kind in SAMPLE_TYPES.items()}


def _buffer(handle: Any, kind: int) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        value_type, samples = pynvml.nvmlDeviceGetSamples(handle, kind, 0)
    except pynvml.NVMLError as error:
        return {"code": nvml.code_name(error)}
    took_us = (time.perf_counter() - began) * 1e6
    times_us = sorted(sample.timeStamp for sample in samples)
    gaps_ms = [(b - a) / 1000 for a, b in itertools.pairwise(times_us)]
    newest_age_s = time.time() - times_us[-1] / 1e6 if times_us else None
    return {
        "code": "success",
        "value_type": value_type,
        "samples": len(times_us),
        "period_ms": round(statistics.median(gaps_ms), 2) if gaps_ms else None,
        "longest_gap_ms": round(max(gaps_ms), 2) if gaps_ms else None,
        "span_s": round((times_us[-1] - times_us[0]) / 1e6, 3) if times_us else None,
        "newest_age_s": None if newest_age_s is None else round(newest_age_s, 3),
        "cost_us": round(took_us, 1),
    }


def buffer_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    for name, buffer in measured.items():
        if buffer["code"] != "success":
            yield Finding(None, f"samples of {name}: {buffer['code']}")
            continue
        text = f"{buffer['samples']} every {buffer['period_ms']} ms over {buffer['span_s']} s"
        yield Finding(None, f"samples of {name}: {text}, {buffer['cost_us']:.0f} µs")


# --- GPM, and without rights ---


def time_gpm(handle: Any, counts: tuple[int, int]) -> dict[str, Any]:
    """What a round of the GPM worker costs; the metrics that answer. Raises NVMLError."""
    supported = bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    if not supported:
        return {"supported": False}
    ours = [*SHARES, *TRAFFIC]
    with nvml.gpm_samples(handle) as samples:
        samples.take()
        time.sleep(GPM_WINDOW_S)
        samples.take()
        metrics = samples.metrics(ours)
        cost = nvml.time_call(lambda: samples.metrics(ours), *counts)
        # Last: samples this close give no metrics.
        return {
            "supported": True,
            "metrics": metrics,
            "metrics_get": cost,
            "sample_get": nvml.time_call(samples.take, *counts),
        }


def gpm_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    if not measured["supported"]:
        yield Finding(None, "GPM is not supported")
        return
    good = [number for number, (code, _) in measured["metrics"].items() if code == "success"]
    bad = [int(number) for number in measured["metrics"] if number not in good]
    yield Finding(None, f"GPM answers {len(good)} of ours, not {spans(bad)}")
    for name in ("sample_get", "metrics_get"):
        cost = measured[name]
        text = f"GPM {name}: p50 {cost['p50_us']:.0f}, p99 {cost['p99_us']:.0f} µs"
        yield Finding(None, text)


def as_nobody(counts: tuple[int, int]) -> Any:
    """The calls and GPM without root's rights: which are refused. Raises CannotCheck."""
    need_root()
    return nvml.as_nobody(lambda: on_gpu(lambda handle: _unprivileged(handle)))


def _unprivileged(handle: Any) -> dict[str, Any]:
    codes = {name: _timed(partial(call, handle), (1, 1))["code"] for name, call in calls()}
    try:
        gpm = time_gpm(handle, (1, 1))
    except pynvml.NVMLError as error:
        gpm = {"code": nvml.code_name(error)}
    return {"codes": codes, "gpm": gpm}


def nobody_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    refused = [name for name, code in measured["codes"].items() if code == "no_permission"]
    yield Finding(None, f"not permitted to an ordinary user: {', '.join(refused) or 'no call'}")
    gpm = measured["gpm"]
    answers = [code for code, _ in gpm.get("metrics", {}).values()]
    if "code" in gpm:
        yield Finding(False, f"GPM as an ordinary user: {gpm['code']}")
    elif not gpm["supported"]:
        yield Finding(None, "GPM is not supported")
    else:
        good = answers.count("success")
        yield Finding(good > 0, f"GPM as an ordinary user: {good} metrics of {len(answers)} answer")
