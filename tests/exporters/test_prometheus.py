"""The exposition: exact, valid for strict parsers, and cheap."""

from __future__ import annotations

import bisect
import itertools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporters.states import TIME, full_state, rank, simulated
from warpwatch_exporters import prometheus
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.attribution import Attribution, Pod, ProcessOwner, Workload
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.profiles import Profile
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, DetectorSight, Histogram, State

Golden = Callable[[str, bytes], None]


@cache
def samples_of(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(page.decode())
        for sample in family.samples
    }


def value_of(page: bytes, name: str, **labels: str) -> float | None:
    return samples_of(page).get((f"warpwatch_{name}", tuple(sorted(labels.items()))))


def test_the_exposition_of_a_full_state_is_the_golden_one(golden: Golden) -> None:
    golden("metrics.prom", render(full_state()))


@pytest.mark.parametrize(("profile", "series"), [("minimal", 31), ("default", 91), ("full", 165)])
def test_promtool_has_nothing_to_say(profile: Profile, series: int) -> None:
    one = State(time=TIME, version="1", hostname="node-1", devices=simulated(1))
    lines = render(one, Options(profile=profile)).splitlines()
    assert sum(b'uuid="' in line for line in lines) == series
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    command = [promtool, "check", "metrics"]
    page = render(full_state(), Options(profile=profile))
    checked = subprocess.run(command, input=page, capture_output=True, timeout=300)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_both_formats_hold_the_same_samples_and_openmetrics_names_units() -> None:
    page = render(full_state(), openmetrics=True).decode()
    strict = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_openmetrics(page + "# EOF\n")  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert strict == samples_of(render(full_state()))
    # A counter's family has no _total there.
    assert "# TYPE warpwatch_device_energy_joules counter\n" in page
    assert "# UNIT warpwatch_device_energy_joules joules\n" in page
    assert "\nwarpwatch_device_energy_joules_total{" in page


def test_inlined_workload_labels_are_on_every_series_of_the_device() -> None:
    state = full_state()
    uuid = state.devices[0].device.uuid
    page = samples_of(render(state, Options(inline_workloads=True)))
    pods = {dict(labels).get("pod") for _, labels in page if ("uuid", uuid) in labels}
    assert pods == {"llama-0"}
    others = {dict(labels).get("pod") for _, labels in page if ("uuid", uuid) not in labels}
    assert others == {None, ""}
    # Without the labels the two expositions are the same.
    own = ("namespace", "pod", "container")
    bare = {(name, tuple(p for p in labels if p[0] not in own)) for name, labels in page}
    joined = samples_of(render(state))
    assert bare == {(name, tuple(p for p in labels if p[0] not in own)) for name, labels in joined}


def test_a_device_that_containers_share_is_inlined_to_none() -> None:
    shared = (Workload("ml", "a", "c"), Workload("ml", "b", "c"))
    state = replace(full_state(), attributions=(Attribution("kubelet", TIME, {"MIG-1": shared}),))
    page = samples_of(render(state, Options(inline_workloads=True)))
    info = [labels for name, labels in page if name == "warpwatch_device_workload_info"]
    assert sorted(dict(labels)["pod"] for labels in info) == ["a", "b"]
    power = [labels for name, labels in page if name == "warpwatch_device_power_watts"]
    assert not [labels for labels in power if "pod" in dict(labels)]


def test_an_eight_per_cent_longer_step_is_another_fine_bucket_and_moves_the_mean() -> None:
    def page(step_s: float) -> bytes:
        counts = [0] * (len(STEP_DURATION_BOUNDS_S) + 1)
        counts[bisect.bisect_left(STEP_DURATION_BOUNDS_S, step_s)] = 100
        changed = rank(0, durations=Histogram(tuple(counts), 100 * step_s))
        return render(replace(full_state(), ranks=(changed,)), Options())

    labels = {"training_job": "llama", "rank": "0", "owner": "uid/1000"}
    for step_s, below in ((0.175, 100), (0.189, 0)):
        found = page(step_s)
        assert value_of(found, "step_duration_seconds_bucket", **labels, le="0.18") == below
        assert value_of(found, "step_seconds_total", **labels) == 100 * step_s
    ratios = [b / a for a, b in itertools.pairwise(STEP_DURATION_BOUNDS_S) if 0.05 <= a < 10.0]
    assert max(ratios) <= 1.25


def test_ranks_anomalies_and_processes_name_their_pod() -> None:
    pods = {"p-1": Pod("team", "llama-0")}
    state = full_state()
    ours = rank(1, owner="ns/team", pod_uid="p-1")
    (anomaly,) = (found for found in state.anomalies if found.end_time is None)
    found = replace(anomaly, job="llama", owner="ns/team", run="r1", rank=1, device=None)
    attributed = (*state.attributions, Attribution("pod_logs", TIME, pods=pods))
    named = replace(state, ranks=(ours,), anomalies=(found,), attributions=attributed)
    for family in ("rank_info", "anomaly_info", "process_info"):
        lines = [line for line in render(named).splitlines() if family.encode() + b"{" in line]
        assert len(lines) == 1
        assert b'namespace="team"' in lines[0] and b'pod="llama-0"' in lines[0], lines


def test_of_a_rank_that_ended_the_counters_stay_and_the_gauges_go() -> None:
    page = render(replace(full_state(), ranks=(rank(0, energy_j=5.0), rank(1, status="exited"))))
    live, ended = (
        {name.removeprefix("warpwatch_") for name, labels in samples_of(page) if own <= set(labels)}
        for own in ({("training_job", "llama"), ("rank", number)} for number in ("0", "1"))
    )
    assert live - ended == {
        "rank_step",
        "rank_step_begun",
        "rank_memory_allocated_bytes",
        "rank_memory_reserved_bytes",
        "rank_memory_peak_allocated_bytes",
        "rank_memory_inactive_split_bytes",
        "rank_energy_joules_total",
    }
    assert {"rank_gc_seconds_total", "rank_allocation_retries_total", "rank_up"} <= ended


def test_a_rank_s_info_has_its_places_in_parallelism_and_its_step_clock() -> None:
    changed = rank(0, parallel={"pipeline": (3, 4)}, step_clock="lightning")
    page = render(replace(full_state(), ranks=(changed,)))
    (info,) = (dict(labels) for name, labels in samples_of(page) if name.endswith("_rank_info"))
    assert (info["rank"], info["step_clock"]) == ("0", "lightning")
    assert (info["pipeline_rank"], info["data_rank"]) == ("3", "")


def test_what_the_shim_does_not_say_of_memory_and_collector_is_absent() -> None:
    unknown = rank(0, gc_s=None, gc_collections_total=None, allocation_retries_total=None)
    page = render(replace(full_state(), ranks=(unknown,))).decode()
    for name in ("rank_gc_", "rank_allocation_retries", "rank_energy"):
        assert name not in page
    assert "rank_out_of_memory_errors_total" in page


def test_who_sees_and_who_is_blind_is_a_gauge_of_kind_and_job() -> None:
    sights = tuple(
        DetectorSight("straggler", job, "ns/team", blind, "limit 1.9")
        for job, blind in (("llama", True), ("other", False))
    )
    page = render(replace(full_state(), sights=sights))
    about = {"kind": "straggler", "owner": "ns/team"}
    assert value_of(page, "detector_blind", **about, training_job="llama") == 1
    assert value_of(page, "detector_blind", **about, training_job="other") == 0


def test_an_active_anomaly_says_what_it_is_about() -> None:
    about = {"kind": "straggler", "severity": "warning", "training_job": "llama", "rank": "1"}
    on_device = {**about, "scope": "job", "namespace": "team", "gpu": "2", "uuid": "GPU-lost"}
    state = full_state()
    (anomaly,) = (found for found in state.anomalies if found.end_time is None)
    found = replace(anomaly, job="llama", owner="ns/team", rank=1, device="GPU-lost")
    page = render(replace(state, anomalies=(found,)))
    assert value_of(page, "anomaly_info", **on_device, owner="ns/team", user="", pod="") == 1
    assert value_of(page, "anomaly_active", kind="hang") == 0
    # The scrape names an agent's node, which an empty label would hide; a fleet's is its own.
    assert b'node="' not in next(line for line in page.splitlines() if b"anomaly_info{" in line)
    there = render(replace(state, anomalies=(replace(found, node="gpu-7"),)))
    assert (
        value_of(there, "anomaly_info", **on_device, owner="ns/team", user="", pod="", node="gpu-7")
        == 1
    )


def test_more_anomalies_than_can_be_described_are_counted() -> None:
    (anomaly,) = (found for found in full_state().anomalies if found.end_time is None)
    many = tuple(replace(anomaly, time=TIME + n, rank=n) for n in range(250))
    page = render(State(TIME, "1", "h", anomalies=many))
    described = [key for key in samples_of(page) if key[0] == "warpwatch_anomaly_info"]
    assert len(described) == 200
    assert value_of(page, "anomaly_active", kind="straggler") == 250


def test_label_values_are_escaped() -> None:
    name = 'a"b\\c\nd\udce9'
    state = State(TIME, "1", "h", ranks=(rank(0, job=name),))
    jobs = {dict(key[1]).get("training_job") for key in samples_of(render(state))}
    assert 'a"b\\c\nd?' in jobs


def test_a_rank_of_another_owner_who_claims_the_same_name_has_series_of_its_own() -> None:
    ranks = (rank(0), rank(0, owner="uid/1001", steps_total=7), rank(0, run="r2", steps_total=8))
    page = render(State(TIME, "1", "h", ranks=ranks))
    labels = {"training_job": "llama", "rank": "0"}
    assert value_of(page, "steps_total", **labels, owner="uid/1000") == 100
    assert value_of(page, "steps_total", **labels, owner="uid/1001") == 7
    assert value_of(page, "ranks_unexported") == 1


def test_at_most_a_thousand_ranks_have_series() -> None:
    lines = render(State(TIME, "1", "h", ranks=tuple(rank(i) for i in range(1003)))).splitlines()
    assert sum(line.startswith(b"warpwatch_steps_total{") for line in lines) == 1000
    assert b"warpwatch_ranks_unexported 3" in lines


def test_only_what_the_catalogue_knows_is_exported() -> None:
    values = {
        ("device_power_watts", ()): float("nan"),
        ("device_energy_joules_total", ()): float("inf"),
        ("device_made_up", ()): 1.0,
        ("device_clock_hertz", ("sm", "extra")): 1.0,
        ("device_recovery_action", ()): 0,
    }
    device = DeviceSample(Device("GPU-1", 0, "x"), TIME, values)
    page = render(State(TIME, "1", "h", devices=(device,)))
    names = {name for name, labels in samples_of(page) if ("uuid", "GPU-1") in labels}
    expected = {"up", "info", "sample_timestamp_seconds", "recovery_action"}
    assert names == {f"warpwatch_device_{name}" for name in expected}


def test_the_golden_state_shows_every_device_metric() -> None:
    names = {name.removeprefix("warpwatch_") for name, _ in samples_of(render(full_state()))}
    assert {row.name for row in CATALOGUE.values() if row.scope == "device"} <= names


def test_what_is_gone_leaves_nothing_behind() -> None:
    uuid = full_state().devices[0].device.uuid
    for pod in range(6):
        held = {uuid: (Workload("ml", f"llama-{pod}", "trainer"),)}
        users = {pid: ProcessOwner("python") for pid in range(pod * 150, pod * 150 + 150)}
        state = State(
            TIME,
            "1",
            "h",
            devices=full_state().devices[:1],
            ranks=(rank(0, job=f"job-{pod}"),),
            attributions=(Attribution("kubelet", TIME, held, processes=users),),
        )
        render(state, Options(inline_workloads=True))
    pods = {workload.pod for _, workload in prometheus._prefixes if workload is not None}
    assert pods == {"llama-5"}
    assert len(prometheus._buckets) == 1
    assert len(prometheus._prefixes[(), None]) < 150 + prometheus.SPARE_PREFIXES + 100
