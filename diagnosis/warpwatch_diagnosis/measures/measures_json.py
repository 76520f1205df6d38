"""Writes measures as the JSON of docs/diagnosis.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from warpwatch_diagnosis.measures.host_events import ACTIVITIES, CAUSES
from warpwatch_diagnosis.measures.intervals import Intervals
from warpwatch_diagnosis.measures.measures import Measures

# Times are in µs with ns; ratios are exact to a hundredth of a percent.
_TIME_DIGITS = 3
_RATIO_DIGITS = 4
_COUNT_DIGITS = 2


def trace_json(measures: Measures) -> dict[str, Any]:
    """Return one entry of ``traces``; times are in µs from the window's begin."""
    gpu, operators = measures.gpu, measures.operators
    return {
        "file": measures.file,
        "rank": measures.rank,
        **({"node": measures.node} if measures.node else {}),
        "device_name": measures.device_name,
        "steps": len(measures.steps),
        "window_s": round(measures.window_s, 6),
        "time": gpu_ratios(measures),
        "cpu": cpu_ratios(measures),
        "idle": _idle(measures),
        "per_step": _per_step(measures),
        "kernels": plain(gpu.kernel_times) if gpu else [],
        "classes": plain(gpu.class_times) if gpu else [],
        "copies": plain(gpu.copy_times) if gpu else [],
        "launches": plain(gpu.launches) if gpu else None,
        "device": gpu.device if gpu else None,
        "devices": plain(gpu.devices) if gpu else [],
        "streams": plain(gpu.streams) if gpu else [],
        "synchronization": plain(measures.synchronization),
        "operators": {
            "by_self_time": plain(operators.by_self_time, without=("longest", "longest_us")),
            "by_gpu_time": plain(operators.by_gpu_time, without=("longest", "longest_us")),
        },
        "host": _host(measures),
        "memory": plain(measures.memory),
        "roofline": plain(measures.roofline),
    }


def gpu_ratios(measures: Measures) -> dict[str, float | None]:
    gpu, overlap = measures.gpu, measures.gpu.overlap_ratio if measures.gpu else None
    unions: dict[str, Intervals | None] = {
        "gpu_busy_ratio": gpu.busy if gpu else None,
        "idle_ratio": gpu.idle if gpu else None,
        "compute_ratio": gpu.compute if gpu else None,
        "communication_ratio": gpu.communication if gpu else None,
        "exposed_communication_ratio": gpu.exposed_communication if gpu else None,
        "overlap_ratio": None,
        "memory_copy_ratio": gpu.copies if gpu else None,
        "data_loading_ratio": measures.loading,
    }
    found = {k: None if us is None else _ratio(measures, us) for k, us in unions.items()}
    return found | {"overlap_ratio": None if overlap is None else round(overlap, _RATIO_DIGITS)}


def cpu_ratios(measures: Measures) -> dict[str, float] | None:
    cpu = measures.cpu
    if cpu is None:
        return None
    parts = {
        "operator_ratio": cpu.operators,
        "dispatch_ratio": cpu.dispatch,
        "collective_wait_ratio": cpu.waiting,
        "host_ratio": cpu.host,
        "compile_ratio": cpu.compile,
        "gc_ratio": cpu.gc,
        "checkpoint_ratio": cpu.checkpoint,
    }
    if measures.server is not None:
        parts["scheduler_ratio"] = cpu.scheduler
        parts["waiting_for_work_ratio"] = cpu.waiting_for_work
    return {key: _ratio(measures, intervals) for key, intervals in parts.items()}


def _ratio(measures: Measures, intervals: Intervals) -> float:
    return round(measures.share(intervals), _RATIO_DIGITS)


def _idle(measures: Measures) -> dict[str, float] | None:
    """Return shares of the window by cause, which add up to ``idle_ratio``."""
    if measures.gpu is None:
        return None
    window_us = measures.window_us or 1.0
    spent = measures.gpu.idle_time
    shares = {
        cause: spent.total_us(cause) / window_us for cause in CAUSES if cause in spent.by_cause
    }
    return {cause: round(share, _RATIO_DIGITS) for cause, share in shares.items()}


def _per_step(measures: Measures) -> list[dict[str, Any]]:
    return [
        {
            "begin_us": round(step.begin_us - measures.window[0], _TIME_DIGITS),
            "duration_us": round(step.duration_us, _TIME_DIGITS),
            **plain(step, without=("begin_us", "end_us")),
        }
        for step in measures.per_step
    ]


def _host(measures: Measures) -> dict[str, Any]:
    host = measures.host
    activities = {name: plain(getattr(host, name), without=("intervals",)) for name in ACTIVITIES}
    return activities | {
        "compiled_regions": host.compiled_regions,
        "recompiled_regions": host.recompiled_regions,
    }


def plain(value: Any, without: tuple[str, ...] = (), name: str = "") -> Any:
    """Turn dataclasses into objects, except the fields ``without``; ``name`` decides rounding."""
    if isinstance(value, float):
        digits = _RATIO_DIGITS if name.endswith("ratio") else _TIME_DIGITS
        return round(value, _COUNT_DIGITS if name.endswith("_count") else digits)
    if is_dataclass(value):
        kept = [f.name for f in fields(value) if f.name not in without]
        return {key: plain(getattr(value, key), name=key) for key in kept}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one, without) for one in value]
    return value
