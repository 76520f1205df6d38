"""The sentence that every surface has for an anomaly."""

import json
from dataclasses import replace

from tests.conftest import Cases
from warpwatch_telemetry.anomalies import Anomaly, sentence

BEGIN = 1_700_018_000.0
SINCE = "since 03:13 UTC on 15 Nov"
OFF_THE_BUS = Anomaly(
    time=BEGIN, severity="critical", summary="XID 79 (GPU has fallen off the bus); look at the GPU",
    job="llama-70b", owner="ns/team", rank=1234, device="GPU-1", gpu=2, id="a1", kind="xid",
)  # fmt: skip


def test_a_sentence_has_cause_place_owner_and_begin(cases: Cases) -> None:
    def said(changes: str) -> str:
        return sentence(replace(OFF_THE_BUS, **json.loads(changes)), "gpu-155")

    cases("telemetry/sentences.txt", said)
