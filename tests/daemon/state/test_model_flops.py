"""Model FLOPs utilization of a job, of now, by what is known of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import RankState

H100 = Device("GPU-1", 0, "NVIDIA H100 80GB HBM3")
RANK = RankState(
    job="train", rank=0, name="0", pid=1, host="h", device="GPU-1", run="r1",
    steps_per_s=4.0, tokens_per_s=8_000.0, samples_per_s=8.0,
)  # fmt: skip


def ratios(*ranks: RankState, traces: Any = (), run: str = "r1") -> dict[str, float]:
    hub = Hub(4.0)
    hub.watch_ranks(lambda: ranks)
    hub.publish_device(DeviceSample(H100, 100.0, {}))
    request = CaptureRequest("train", "torch", "manual", run=run)
    hub.publish(captures=(Capture("c1", request, 1.0, diagnosis={"traces": traces}),))
    (job,) = hub.state().jobs
    return dict(job.model_flops_ratio)


def test_it_is_the_time_at_the_peak_of_what_a_capture_counted_by_the_time_of_a_step() -> None:
    # At its peak a GPU would need 0.1 s of the 0.5 s of four steps each.
    trace = {"window_s": 0.5, "steps": 4, "roofline": {"mfu_ratio": 0.2}}
    other = {"window_s": 0.5, "steps": 4, "roofline": {"mfu_ratio": 0.4}}
    assert ratios(RANK, traces=[trace, other]) == {"shapes": pytest.approx(0.0375 * 4)}
    # Of another run, without a GPU, or without a step.
    assert ratios(RANK, traces=[trace], run="r2") == {}
    assert ratios(RANK, traces=[{**trace, "roofline": None}, {**other, "steps": 0}]) == {}
    assert ratios(replace(RANK, steps_per_s=None), traces=[trace]) == {}


def test_what_the_job_says_is_of_the_peak_of_its_precision() -> None:
    said = replace(RANK, flops_per_token=6 * 7e9, precision="bfloat16")
    assert ratios(said) == {"user": pytest.approx(6 * 7e9 * 8_000 / 989.4e12)}
    by_sample = replace(RANK, flops_per_sample=1e12, precision="bfloat16")
    assert ratios(by_sample) == {"user": pytest.approx(8e12 / 989.4e12)}
    # Four ranks read the same tokens, and each computes a quarter.
    parts = replace(said, parallel={"data": (0, 8), "tensor": (1, 2), "context": (0, 2)})
    assert ratios(parts)["user"] == pytest.approx(ratios(said)["user"] / 4)
    # One rank of two, a precision without a peak, a GPU that is not in the table.
    assert ratios(said, replace(RANK, rank=1, name="1")) == {}
    assert ratios(replace(said, precision="bf16")) == {}
    assert ratios(replace(said, device="GPU-2")) == {}


def test_parameters_and_tokens_are_the_fallback_of_a_model_that_is_not_split() -> None:
    known = replace(RANK, parameters=7 * 10**9, precision="bfloat16", parallel={"data": (0, 8)})
    expected = 6 * 7e9 * 8_000 / 989.4e12
    assert ratios(known) == {"parameters": pytest.approx(expected)}
    trace = {"window_s": 0.5, "steps": 4, "roofline": {"mfu_ratio": 0.2}}
    assert ratios(known, traces=[trace]).keys() == {"shapes"}
    assert ratios(replace(known, flops_per_token=1e10)).keys() == {"user"}
    for unknown in (
        {"parallel": {"tensor": (0, 2)}}, {"precision": ""}, {"tokens_per_s": None},
        {"parameters": 0}, {"device": "GPU-2"},
    ):  # fmt: skip
        fields: dict[str, Any] = unknown
        assert ratios(replace(known, **fields)) == {}
