"""The sentence that every surface has for an anomaly."""

from dataclasses import replace
from typing import Any

import pytest

from warpwatch_telemetry.anomalies import Anomaly, first_sentence, sentence

BEGIN = 1_700_018_000.0
SINCE = "since 03:13 UTC on 15 Nov"
OFF_THE_BUS = Anomaly(
    time=BEGIN,
    severity="critical",
    summary="XID 79 (GPU has fallen off the bus); look at the GPU",
    job="llama-70b",
    owner="ns/team",
    rank=1234,
    device="GPU-1",
    gpu=2,
    id="a1",
    kind="xid",
)
SLOW: dict[str, Any] = {"kind": "straggler", "summary": "slow", "gpu": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "XID 79 (GPU has fallen off the bus): GPU 2 on gpu-155, rank 1234 of llama-70b "
            f"(ns/team), {SINCE}; look at the GPU",
        ),
        (
            {"job": None, "rank": None, "owner": "", "summary": "heat"},
            f"heat: GPU 2 on gpu-155, {SINCE}",
        ),
        (
            {"gpu": None, "device": "mlx5_0/1", "job": None, "owner": "", "summary": "down"},
            f"down: mlx5_0/1 on gpu-155, {SINCE}",
        ),
        (SLOW, f"slow: rank 1234 of llama-70b (ns/team) on gpu-155, {SINCE}"),
        (SLOW | {"node": "gpu-2"}, f"slow: rank 1234 of llama-70b (ns/team) on gpu-2, {SINCE}"),
        (SLOW | {"rank": None, "owner": "", "judged_by": "fleet"}, f"slow: llama-70b, {SINCE}"),
        (
            SLOW | {"rank": None, "job": None, "owner": "", "end_time": BEGIN + 86400},
            "slow: on gpu-155, from 03:13 UTC on 15 Nov to 03:13 UTC on 16 Nov",
        ),
        (
            SLOW | {"rank": None, "job": None, "owner": "", "end_time": BEGIN + 120},
            "slow: on gpu-155, from 03:13 to 03:15 UTC on 15 Nov",
        ),
        (
            SLOW | {"rank": None, "summary": "x" * 999, "time": float("1e300")},
            f"{'x' * 199}…: llama-70b (ns/team) on gpu-155, since an unknown time",
        ),
    ],
)
def test_a_sentence_has_cause_place_owner_and_begin(changes: dict[str, Any], said: str) -> None:
    assert sentence(replace(OFF_THE_BUS, **changes), "gpu-155") == said


def test_a_label_has_the_first_cause_alone_whatever_is_found_later() -> None:
    said = f"GPU 2 on gpu-155, rank 1234 of llama-70b (ns/team), {SINCE}"
    found = replace(OFF_THE_BUS, first_summary="XID 31 (Memory page fault); look at the job")
    assert first_sentence(found, "gpu-155") == f"XID 31 (Memory page fault): {said}"
    # As an older daemon kept it.
    assert first_sentence(OFF_THE_BUS, "gpu-155") == f"xid: {said}"
