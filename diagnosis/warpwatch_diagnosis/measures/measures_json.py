"""Measures as JSON: the numbers beside the ratios of schema 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from warpwatch_diagnosis.measures.idle import CAUSES

if TYPE_CHECKING:
    from warpwatch_diagnosis.measures.gpu_time import GpuTime
    from warpwatch_diagnosis.measures.measures import Measures

# Times are in µs with ns; ratios to a hundredth of a percent.
_TIME_DIGITS = 3
_RATIO_DIGITS = 4


def details(measures: Measures) -> dict[str, Any]:
    """Keys of one entry of ``traces`` beside the ratios; times in µs from the window's begin."""
    gpu = measures.gpu
    begin_us = measures.window[0]
    return {
        "idle": _idle(measures, gpu),
        "per_step": [
            {"begin_us": round(s.begin_us - begin_us, _TIME_DIGITS)}
            | {"duration_us": round(s.duration_us, _TIME_DIGITS)}
            | {k: v for k, v in plain(s).items() if k not in ("begin_us", "end_us")}
            for s in measures.per_step
        ],
        "kernels": plain(gpu.kernel_times) if gpu else [],
        "classes": plain(gpu.class_times) if gpu else [],
        "copies": [
            plain(c) | {"bandwidth_gb_per_s": plain(c.bandwidth_gb_per_s)} for c in gpu.copy_times
        ]
        if gpu
        else [],
        "launches": plain(gpu.launches) if gpu else None,
        "device": gpu.device if gpu else None,
        "devices": plain(gpu.devices) if gpu else [],
        "streams": plain(gpu.streams) if gpu else [],
        "synchronization": plain(measures.synchronization),
        "operators": {
            "by_self_time": _operators(measures.operators.by_self_time),
            "by_gpu_time": _operators(measures.operators.by_gpu_time),
        },
        "host": _host(measures),
        "memory": [
            {key: value for key, value in plain(m).items() if key != "points"}
            for m in measures.memory
        ],
        "roofline": plain(measures.roofline),
    }


def _idle(measures: Measures, gpu: GpuTime | None) -> dict[str, float] | None:
    """Shares of the window by cause; together they are ``idle_ratio``."""
    if gpu is None:
        return None
    window_us = measures.window_us or 1.0
    shares = {cause: gpu.idle_time.total_us(cause) / window_us for cause in CAUSES}
    return {cause: round(share, _RATIO_DIGITS) for cause, share in shares.items()}


def _operators(times: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [{k: v for k, v in plain(time).items() if k != "longest"} for time in times]


def _host(measures: Measures) -> dict[str, Any]:
    host = measures.host
    activities = ("loading", "gc", "compile", "checkpoint", "allocator", "collectives")
    found: dict[str, Any] = {}
    for name in activities:
        activity = getattr(host, name)
        found[name] = {
            "count": activity.count,
            "total_us": round(activity.total_us, _TIME_DIGITS),
            "longest_us": round(activity.longest_us, _TIME_DIGITS),
            "names": list(activity.names),
        }
    return found | {
        "compiled_regions": host.compiled_regions,
        "recompiled_regions": host.recompiled_regions,
    }


def plain(value: Any) -> Any:
    """Dataclasses become objects, floats are rounded: ratios finer than times."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _rounded(f.name, getattr(value, f.name))
            if isinstance(getattr(value, f.name), float)
            else plain(getattr(value, f.name))
            for f in fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return round(value, _TIME_DIGITS) if isinstance(value, float) else value


def _rounded(name: str, value: float) -> float:
    return round(value, _RATIO_DIGITS if name.endswith("_ratio") else _TIME_DIGITS)
