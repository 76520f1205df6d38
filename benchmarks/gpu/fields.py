"""What only hardware tells of fields: their units, their width, and which numbers there are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pynvml

from benchmarks.gpu import loads, nvml
from benchmarks.gpu.check import Finding, Part, Setting, need_torch
from benchmarks.gpu.sampling import Followed, following
from warpwatch_devices.nvml.fields import ALL_LINKS, fast_fields

ENERGY, POWER_AVERAGE, POWER_INSTANT = 83, 185, 186
PCIE_TX, PCIE_RX = 197, 198
NVLINK = (138, 139, 140, 141)
POLICIES = tuple(range(74, 82))
# Where throttle counters are: the one range before, the other since driver 580.82.
OLD_REASONS, NEW_REASONS = (251, 252, 253), (269, 270, 271)
SW_POWER_CAP_BIT = 0x4
# A counter of ns grows by no more than this in a second; of µs by a thousandth.
_NS_PER_S = 1e9
FOLLOW_INTERVAL_S = 0.02
# At 64 GB/s a 32-bit byte counter starts over every 67 ms.
PCIE_INTERVAL_S = 0.005
# By how much two ways to measure the same may differ.
TOLERANCE = 0.05


def parts(setting: Setting) -> Iterator[Part]:
    yield Part("numbers", numbers, number_findings)
    for kind in ("idle", "matmul"):
        yield Part(f"times_{kind}", _times(setting, kind), time_findings)
        yield Part(f"energy_{kind}", _energy(setting, kind), energy_findings)
    for kind in ("host_to_device", "device_to_host"):
        yield Part(f"pcie_{kind}", _pcie(setting, kind), pcie_findings)
    yield Part("nvlink", nvlink, nvlink_findings)


@contextlib.contextmanager
def loaded(setting: Setting, kind: str) -> Iterator[loads.Load | None]:
    """Idle needs no process: nothing runs."""
    if kind == "idle":
        yield None
        return
    need_torch(setting)
    with loads.running(kind, setting.device) as load:
        yield load


# --- which numbers ---


def numbers() -> dict[str, Any]:
    with nvml.first_gpu() as handle:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        ours = {field.number for field in fast_fields(version)}
        return {
            "driver_version": version,
            "library_fields": pynvml.NVML_FI_MAX,
            "old": {n: nvml.read_fields(handle, [n])[0] for n in OLD_REASONS},
            "new": {n: nvml.read_fields(handle, [n])[0] for n in NEW_REASONS},
            "ours": sorted(ours & {*OLD_REASONS, *NEW_REASONS}),
        }


def number_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    answers = {**measured["old"], **measured["new"]}
    good = [number for number, answer in answers.items() if answer["code"] == "success"]
    text = f"throttle counters answer at {good}; for {measured['driver_version']} we read"
    yield Finding(set(measured["ours"]) <= set(good), f"{text} {measured['ours']}")


# --- times: units of policy and reason counters ---


def _times(setting: Setting, kind: str) -> Any:
    return lambda: times(setting, kind)


def times(setting: Setting, kind: str) -> dict[str, Any]:
    """Growth of each time counter, beside how often the power cap was seen to hold."""
    fields = (*POLICIES, *OLD_REASONS, *NEW_REASONS)
    span_s = setting.seconds(6, 0.5)
    with loaded(setting, kind), nvml.first_gpu() as handle:
        with following(handle, fields, FOLLOW_INTERVAL_S) as followed:
            capped = _share_capped(handle, span_s)
        growths = {number: followed.growth(number) for number in fields}
    return {"load": kind, "capped_share": capped, "growth": growths}


def _share_capped(handle: Any, span_s: float) -> float | None:
    """How much of the time the software power cap held clocks down, by looking often."""
    seen = []
    deadline = time.monotonic() + span_s
    while time.monotonic() < deadline:
        with contextlib.suppress(pynvml.NVMLError):
            bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            seen.append(bool(bits & SW_POWER_CAP_BIT))
        time.sleep(FOLLOW_INTERVAL_S)
    return round(sum(seen) / len(seen), 4) if seen else None


def time_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    load = measured["load"]
    for number, growth in measured["growth"].items():
        per_s = growth.get("growth_per_s")
        if not per_s:
            continue
        share = per_s / _NS_PER_S
        text = f"field {number} under {load} grows by {per_s:.4g} a second: as ns {share:.4f} s/s"
        # In µs or ms it would be far below, or not reach a second in a second.
        yield Finding(0 <= share <= 1 + TOLERANCE, text)
    policy = measured["growth"][POLICIES[0]].get("growth_per_s")
    if policy is not None and measured["capped_share"] is not None:
        text = f"power policy {policy / _NS_PER_S:.3f} s/s, cap seen {measured['capped_share']:.3f}"
        yield Finding(None, f"under {load}: {text} of the time")


# --- energy ---


def _energy(setting: Setting, kind: str) -> Any:
    return lambda: energy(setting, kind)


def energy(setting: Setting, kind: str) -> dict[str, Any]:
    fields = (ENERGY, POWER_AVERAGE, POWER_INSTANT)
    with loaded(setting, kind), nvml.first_gpu() as handle:
        # The average is of a second: let it forget what was before.
        time.sleep(setting.seconds(1.5, 0.0))
        with following(handle, fields, FOLLOW_INTERVAL_S) as followed:
            time.sleep(setting.seconds(5, 0.5))
    return {"load": kind, **_energy_ratios(followed)}


def _energy_ratios(followed: Followed) -> dict[str, Any]:
    counted = followed.growth(ENERGY)
    answer: dict[str, Any] = {"counter": counted}
    for name, number in (("average", POWER_AVERAGE), ("instant", POWER_INSTANT)):
        integral = followed.integral(number)
        answer[f"{name}_integral"] = integral
        # Over whole updates of the counter alone both would be the same span.
        answer[f"counter_over_{name}"] = (
            round(counted["growth"] / integral, 4) if integral and "growth" in counted else None
        )
    return answer


def energy_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    ratios = {name: measured[f"counter_over_{name}"] for name in ("average", "instant")}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        code = measured["counter"]["code"]
        yield Finding(None, f"energy counter under {measured['load']}: {code}")
        return
    text = ", ".join(f"{ratio:.3f} of {name} power" for name, ratio in known.items())
    ok = any(abs(ratio - 1) <= TOLERANCE for ratio in known.values())
    changes = measured["counter"]["changes"] / measured["counter"]["span_s"]
    text = f"energy counter under {measured['load']}: {text}; {changes:.0f} changes a second"
    yield Finding(ok, text)


# --- PCIe ---


def _pcie(setting: Setting, kind: str) -> Any:
    return lambda: pcie(setting, kind)


def pcie(setting: Setting, kind: str) -> dict[str, Any]:
    """The byte counters over a copy of known size. Raises CannotCheck."""
    need_torch(setting)
    counters = (PCIE_TX, PCIE_RX)
    with (
        nvml.first_gpu() as handle,
        following(handle, counters, PCIE_INTERVAL_S) as seen,
        loads.running(kind, setting.device) as load,
    ):
        time.sleep(setting.seconds(3, 0.3))
        done = load.stop()
    # What warming up has moved before, the load does not count.
    for readings in seen.readings.values():
        readings[:] = [reading for reading in readings if reading[0] >= done["began"]]
    growths = {n: seen.growth(n) for n in counters}
    return {"load": kind, "copied_bytes": done["bytes"], "did": done, "growth": growths}


def pcie_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    copied = measured["copied_bytes"]
    for number, growth in measured["growth"].items():
        if growth["code"] != "success":
            yield Finding(None, f"PCIe counter {number}: {growth['code']}")
            continue
        ratio, wrapped = growth["growth"] / copied, growth["growth_if_32_bits"] / copied
        text = f"PCIe counter {number} over {measured['load']} of {copied:.3g} bytes: {ratio:.4f}"
        text += f" of them ({wrapped:.4f} with {growth['falls']} wraps at 2**32),"
        yield Finding(None, f"{text} highest {growth['highest']:.4g}")
    yield _direction(measured)


def _direction(measured: dict[str, Any]) -> Finding:
    """Which of the two has counted the copy: what goes to the device is received by it."""
    growths = measured["growth"]
    if any(growth["code"] != "success" for growth in growths.values()):
        return Finding(None, f"direction of {measured['load']} unknown")
    sent, received = (growths[n]["growth_if_32_bits"] for n in (PCIE_TX, PCIE_RX))
    larger = PCIE_RX if received > sent else PCIE_TX
    right = PCIE_RX if measured["load"] == "host_to_device" else PCIE_TX
    expected = abs(growths[larger]["growth_if_32_bits"] / measured["copied_bytes"] - 1) <= 0.25
    text = f"{measured['load']} is counted by field {larger}, in bytes: {expected}"
    return Finding(larger == right and expected, text)


# --- NVLink ---


def nvlink() -> dict[str, Any]:
    """One GPU alone has nobody to talk to: which numbers and scopes answer is all there is."""
    with nvml.first_gpu() as handle:
        answers = {
            f"{number}/{'all' if scope == ALL_LINKS else scope}": nvml.read_fields(
                handle, [(number, scope)]
            )[0]
            for number in NVLINK
            for scope in (0, ALL_LINKS)
        }
        states: list[int | str] = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                states.append(int(pynvml.nvmlDeviceGetNvLinkState(handle, link)))
            except pynvml.NVMLError as error:
                states.append(nvml.code_name(error))
    return {"answers": answers, "states": states}


def nvlink_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    good = [name for name, answer in measured["answers"].items() if answer["code"] == "success"]
    up = measured["states"].count(1)
    yield Finding(None, f"NVLink: {up} links up, throughput fields that answer: {good or 'none'}")
