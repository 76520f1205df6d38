"""Copies by direction and kind of host memory."""

from __future__ import annotations

import pytest

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.copies import CopyTime, copy_kind
from warpwatch_diagnosis.measures.measures import measure


@pytest.mark.parametrize(
    ("name", "direction", "memory"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "HtoD", "pageable"),
        ("Memcpy HtoD (Pinned -> Device)", "HtoD", "pinned"),
        ("Memcpy DtoH (Device -> Pageable)", "DtoH", "pageable"),
        ("Memcpy DtoD (Device -> Device)", "DtoD", None),
        ("Memcpy PtoP (Device -> Device)", "PtoP", None),
        ("Memcpy HtoD (Host -> Device)", "HtoD", None),
        ("CopyDeviceToHost", "DtoH", None),
        ("Memset (Device)", "memset", None),
        ("something", "unknown", None),
    ],
)
def test_the_profilers_name_says_direction_and_memory(
    name: str, direction: str, memory: str | None
) -> None:
    assert copy_kind(name) == (direction, memory)


def copies(timeline: Timeline) -> list[CopyTime]:
    gpu = measure(timeline.trace).gpu
    assert gpu is not None
    return list(gpu.copy_times)


def test_bytes_bandwidth_and_what_no_kernel_hides() -> None:
    timeline = Timeline()
    timeline.kernel(500, 1_000, -10)
    timeline.copy(0, 1_000, -20, "Memcpy HtoD (Pinned -> Device)", arguments={"bytes": 20_000_000})
    timeline.copy(
        2_000, 1_000, -20, "Memcpy HtoD (Pinned -> Device)", arguments={"bytes": 20_000_000}
    )
    timeline.copy(5_000, 1, -20, "Memcpy DtoH (Device -> Pageable)", arguments={"bytes": 4})
    pinned, read = copies(timeline)
    assert (pinned.count, pinned.bytes, pinned.total_us) == (2, 40_000_000, 2_000)
    assert (pinned.exposed_us, pinned.bandwidth_gb_per_s, pinned.small_count) == (1_500, 20.0, 0)
    assert (read.direction, read.memory, read.small_count) == ("DtoH", "pageable", 1)


def test_copies_that_do_not_tell_their_size_have_no_bandwidth() -> None:
    timeline = Timeline()
    timeline.copy(0, 10, -20, "Memcpy HtoD (Host -> Device)")
    (found,) = copies(timeline)
    assert (found.bytes, found.bandwidth_gb_per_s) == (None, None)


def test_bandwidth_is_that_of_whole_copies_also_where_the_window_cuts_them() -> None:
    timeline = Timeline()
    timeline.copy(9_000, 4_000, 8_990, "CopyHostToDevice", arguments={"bytes": 40_000_000})
    (found,) = copies(timeline)
    assert (found.total_us, found.bytes, found.bandwidth_gb_per_s) == (1_000, 40_000_000, 10.0)
