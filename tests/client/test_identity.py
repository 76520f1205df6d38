"""Tests of the job and rank that a process reports."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from warpwatch import identity, protocol
from warpwatch.identity import describe, phase_name
from warpwatch.ring import ring_name


def test_a_process_group_has_the_place_that_torchrun_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group: Any = dict.fromkeys(("is_available", "is_initialized"), lambda: True)
    group |= {"get_rank": lambda: 2, "get_world_size": lambda: 6}
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**group))
    places: list[dict[str, str]] = [
        {},
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8"},
        {"RANK": "3", "WORLD_SIZE": "4"},
    ]
    found = [describe("a", environ) for environ in places]
    assert [(one["rank"], one["world_size"]) for one in found] == [(2, 6), (2, 6), (3, 4)]


def test_the_longest_metadata_fits_into_its_slot() -> None:
    environ = {"WARPWATCH_POD_UID": "\U0001f600" * 500, "WARPWATCH_RUN": "r" * 500}
    environ |= {"WARPWATCH_PRECISION": "p" * 99, "WARPWATCH_FLOPS_PER_TOKEN": f"{1 / 3e-12}"}
    environ |= {"WARPWATCH_FLOPS_PER_SAMPLE": f"{1 / 3e-20}"}
    environ |= {"MASTER_ADDR": "m" * 500, "MASTER_PORT": "29500", "RANK": str(2**31 - 1)}
    found = describe("訓" * 500, environ)
    found["hostname"] = identity.bounded("é" * 500, 64, 64)
    found["torch"] = "9" * 32
    phases = [phase_name(f"{number}" + "p" * 90) for number in range(16)]
    found |= {"device": "G" * 64, "phases": phases, "step_clock": "optimizer"}
    found |= {"client": "10.10.10", "inbox_ok": False, "faults": 10**6, "events_per_step": 10**7}
    found |= {"steps_elsewhere": 10**12}
    found |= {"held_stacks": f"held.{'j' * 40}-r{2**31 - 1}-{'0' * 16}.stacks.fifo"}
    place = (2**20 - 1, 2**20)
    found["parameters"] = 10**15
    found["parallel"] = dict.fromkeys(("data", "tensor", "pipeline", "expert", "context"), place)
    found = identity.fitted(found)
    assert (len(found["run"]), len(found["master"])) == (128, 64)
    assert "parallel" not in found and "phases" in found and "parameters" not in found
    assert len(protocol.encode_metadata(1, found)) <= protocol.META_SLOT_SIZE
    assert len(found["job"]) == 64
    assert len(json.dumps(found["job"])) <= 386
    for excess in (0, 1):
        about = {"job": "j", "note": "n" * (protocol.META_MAX_TEXT - 21 + excess)}
        assert ("note" in identity.fitted(about)) == (excess == 0)


def test_a_ring_is_named_by_job_and_rank_in_a_plain_file_name() -> None:
    assert ring_name("..a b/ü", 3)[:-16] == "a_b__-r3-"
    assert ring_name("j" * 99, 0)[:-16] == "j" * 40 + "-r0-"
