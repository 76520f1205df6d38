"""dcgm-exporter's names: the default list, its labels in their order, its units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporters.states import TIME, full_state, simulated
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.attribution import Attribution, Workload
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import State

Golden = Callable[[str, bytes], None]

OPTIONS = Options(dcgm_names=True, node="node-1")


def dcgm_lines(state: State, options: Options = OPTIONS) -> list[str]:
    return [
        line for line in render(state, options).decode().splitlines() if line.startswith("DCGM_")
    ]


def mig_state() -> State:
    (parent,) = simulated(1)
    about = {"profile": "1g.10gb", "info": {"parent_uuid": parent.device.uuid}}
    instances = [
        DeviceSample(
            Device(f"MIG-{i}", 0, "NVIDIA H100 MIG 1g.10gb", gpu_instance=gi, **about),
            TIME,
            {("device_memory_used_bytes", ()): 3 * 2**30},
        )
        # The last two are compute instances of one GPU instance.
        for i, gi in enumerate(("7", "9", "9"))
    ]
    # Another GPU was at the index before, and is lost.
    gone = DeviceSample(Device("GPU-gone", 0, "x"), TIME, up=False, reason="lost")
    return State(TIME, "1", "host-1", devices=(parent, *instances, gone))


def test_the_exposition_is_the_golden_one(golden: Golden) -> None:
    """Names, order, labels and numbers are those of dcgm-exporter 4.5's default list."""
    held = {simulated(1)[0].device.uuid: (Workload("ml", "llama-0", "trainer"),)}
    state = replace(
        full_state(), attributions=(Attribution("kubelet", TIME, held),), ranks=(), jobs=()
    )
    lines = [line for line in render(state, OPTIONS).decode().splitlines() if "DCGM_" in line]
    golden("dcgm.prom", "\n".join([*lines, ""]).encode())


def test_only_devices_that_are_up_have_such_names_and_only_with_the_option() -> None:
    down = DeviceSample(Device("GPU-1", 0, "x"), TIME, up=False, reason="lost")
    assert dcgm_lines(State(TIME, "1", "h", (down,))) == []
    assert dcgm_lines(full_state(), Options()) == []


def test_the_newest_xid_is_the_value_and_is_named() -> None:
    (sample,) = simulated(1)
    none = next(line for line in dcgm_lines(State(TIME, "1", "h", (sample,))) if "XID" in line)
    assert none.endswith(',err_code="0",err_msg="No Error"} 0')
    values = dict(sample.values)
    for xid, seen in (("79", TIME - 9), ("31", TIME - 1)):
        values["device_xid_errors_total", (xid,)] = 1
        values["device_xid_last_timestamp_seconds", (xid,)] = seen
    state = State(TIME, "1", "h", (replace(sample, values=values),))
    line = next(line for line in dcgm_lines(state) if "XID" in line)
    assert 'err_code="31"' in line and line.endswith(" 31")


def test_a_gpu_instance_is_known_by_its_parent_and_comes_once() -> None:
    lines = [line for line in dcgm_lines(mig_state()) if "FB_USED" in line and "GPU_I_ID" in line]
    assert len(lines) == 2
    uuid = mig_state().devices[0].device.uuid
    assert all(f'UUID="{uuid}"' in line for line in lines)
    assert 'GPU_I_PROFILE="1g.10gb",GPU_I_ID="7",Hostname=' in lines[0]
    # What describes the whole GPU is there too, which dcgm-exporter leaves out.
    assert any("GPU_TEMP" in line for line in dcgm_lines(mig_state()))


def test_strict_parsers_take_both_formats() -> None:
    text = render(full_state(), OPTIONS).decode()
    named = {family.name for family in parse_text(text) if family.name.startswith("DCGM_")}
    strict = render(full_state(), OPTIONS, openmetrics=True).decode() + "# EOF\n"
    families = list(parse_openmetrics(strict))  # type: ignore[no-untyped-call]
    assert {family.name for family in families if family.name.startswith("DCGM_")} == named
    assert len(named) == 25
