"""The exposition: exact, valid for strict parsers, and cheap."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporters.states import TIME, full_state, mig_state, odd_state, rank, simulated
from warpwatch_exporters import prometheus
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.catalogue import Profile
from warpwatch_telemetry.samples import Attribution, ProcessOwner, Workload
from warpwatch_telemetry.state import State

DCGM = Options(dcgm_names=True)
Golden = Callable[[str, bytes], None]


@pytest.mark.parametrize(("name", "state"), [("metrics", full_state()), ("odd", odd_state())])
def test_the_exposition_is_the_golden_one(
    golden: Golden, name: str, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    prometheus._prefixes.clear()
    golden(f"{name}.prom", render(state))
    missing = ("device_made_up ()", "device_clock_hertz ('sm', 'extra')") if name == "odd" else ()
    text = "not exported, since the catalogue has no such series:"
    assert caplog.messages == [f"{text} {one}" for one in missing]


def test_openmetrics_is_the_golden_one_for_a_strict_parser(golden: Golden) -> None:
    """A counter's family has no _total there, and units have lines of their own."""
    page = render(full_state(), openmetrics=True)
    golden("exporters/openmetrics.txt", page)
    assert len([*parse_openmetrics(page.decode() + "# EOF\n")]) > 50  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("name", "state"), [("dcgm", full_state()), ("dcgm_mig", mig_state())])
def test_names_of_dcgm_exporter_are_the_golden_ones_for_strict_parsers_too(golden, name, state):
    """Names, order, labels and numbers are those of dcgm-exporter 4.5's default list."""
    text = render(state, DCGM).decode()
    lines = [line for line in text.splitlines() if "DCGM_" in line]
    golden(f"{name}.prom", "\n".join([*lines, ""]).encode())
    named = {family.name for family in parse_text(text) if family.name.startswith("DCGM_")}
    strict = parse_openmetrics(render(state, DCGM, openmetrics=True).decode() + "# EOF\n")  # type: ignore[no-untyped-call]
    assert {one.name for one in strict if one.name.startswith("DCGM_")} == named
    assert len(named) == (25 if name == "dcgm" else 24)
    assert b"DCGM_" not in render(State(TIME, "1", "h"), DCGM)
    assert b"DCGM_" not in render(state)


@pytest.mark.parametrize(("profile", "series"), [("minimal", 31), ("default", 91), ("full", 165)])
def test_promtool_has_nothing_to_say(profile: Profile, series: int) -> None:
    one = State(time=TIME, version="1", hostname="node-1", devices=simulated(1))
    lines = render(one, Options(profile=profile)).splitlines()
    assert sum(b'uuid="' in line for line in lines) == series
    page = render(full_state(), Options(profile=profile))
    # With all buckets, or those of the coarse bounds.
    assert (b'le="0.06"' in page) is (profile == "full")
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    command = [promtool, "check", "metrics"]
    checked = subprocess.run(command, input=page, capture_output=True, timeout=300)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.parametrize("state", [full_state(), odd_state()])
def test_inlined_labels_are_on_every_series_of_a_device_with_one_workload(state: State) -> None:
    inlined = render(state, Options(inline_workloads=True)).decode().splitlines()
    held = ',namespace="ml",pod="llama-0",container="trainer"}'
    # Containers share the device of the odd state, and have no label there.
    uuid = f'uuid="{full_state().devices[0].device.uuid}"' if state == full_state() else "none"
    for line, joined in zip(inlined, render(state).decode().splitlines(), strict=True):
        is_held = uuid in joined and "workload_info" not in joined
        assert line == (joined.replace("}", held) if is_held else joined)


def test_more_anomalies_than_can_be_described_are_counted() -> None:
    (anomaly,) = (found for found in full_state().anomalies if found.end_time is None)
    many = tuple(replace(anomaly, time=TIME + n, rank=n) for n in range(250))
    # A graver one is described, however old.
    grave = replace(anomaly, time=0.0, severity="critical")
    lines = render(State(TIME, "1", "h", anomalies=(*many, grave))).splitlines()
    described = [line for line in lines if line.startswith(b"warpwatch_anomaly_info{")]
    assert len(described) == 200
    assert sum(b'severity="critical"' in line for line in described) == 1
    # The newest of the others are.
    assert [b'rank="%d"' % rank in b"".join(described) for rank in (50, 51)] == [False, True]
    assert b'warpwatch_anomaly_active{kind="straggler"} 251' in lines


def test_at_most_a_thousand_ranks_have_series() -> None:
    lines = render(State(TIME, "1", "h", ranks=tuple(rank(i) for i in range(1003)))).splitlines()
    assert sum(line.startswith(b"warpwatch_steps_total{") for line in lines) == 1000
    assert b"warpwatch_ranks_unexported 3" in lines


@pytest.mark.parametrize(("first", "are_dropped"), [(100, False), (101, True)])
def test_what_is_gone_leaves_at_most_500_prefixes_behind(first: int, are_dropped: bool) -> None:
    uuid = full_state().devices[0].device.uuid
    prometheus._prefixes.clear()
    for pod in range(6):
        held = {uuid: (Workload("ml", f"llama-{pod}", "trainer"),)}
        pids = range(pod * 1000, pod * 1000 + (100 if pod else first))
        users = {pid: ProcessOwner("python") for pid in pids}
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
    assert (prometheus._prefixes[(), None] == {}) is are_dropped


def families(page: bytes) -> dict[str, object]:
    return {
        family.name: (
            *(family.type, family.documentation),
            {(s.name, frozenset(s.labels.items())): s.value for s in family.samples},
        )
        for family in parse_text(page.decode())
    }


@pytest.mark.parametrize("state", [full_state(), odd_state(), State(TIME, "1", "h")])
def test_it_has_the_same_families_and_samples_as_the_page(state: State) -> None:
    shown = families(generate_latest(StateCollector(lambda: state)))
    assert shown == families(render(state))
    assert shown["warpwatch_build_info"]
