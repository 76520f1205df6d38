"""Which value of ours is which of nvidia-smi's: series, path in the XML, unit, and how far apart.

Paths are those of the XML of the drivers 550 to 580. Where several stand, the first that the
driver writes counts. Ours = theirs x ``factor`` + ``offset``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warpwatch_telemetry.reliability_metrics import REMAP_AVAILABILITIES

_MIB = 2.0**20
_MHZ = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """``moves``: how far it may move, in our unit, within the seconds between the readings.

    counter: it may only grow. words: for texts that are no number.
    """

    series: str
    paths: tuple[str, ...]
    factor: float = 1.0
    moves: float = 0.0
    counter: bool = False
    words: tuple[tuple[str, float], ...] = ()


def _row(series: str, *paths: str, factor: float = 1.0, moves: float = 0.0) -> Row:
    return Row(series, paths, factor, moves)


def _counter(series: str, *paths: str, factor: float = 1.0) -> Row:
    return Row(series, paths, factor, counter=True)


def _memory() -> Iterator[Row]:
    for state in ("total", "reserved", "used", "free"):
        moves = 0.0 if state == "total" else 64 * _MIB
        path = f"fb_memory_usage/{state}"
        yield _row(f"memory_{state}_bytes", path, factor=_MIB, moves=moves)
        if state != "reserved":
            path = f"bar1_memory_usage/{state}"
            yield _row(f"bar1_memory_{state}_bytes", path, factor=_MIB, moves=moves)


def _utilization() -> Iterator[Row]:
    yield _row("utilization_ratio", "utilization/gpu_util", factor=0.01, moves=0.1)
    yield _row("memory_utilization_ratio", "utilization/memory_util", factor=0.01, moves=0.1)
    for unit in ("encoder", "decoder", "jpeg", "ofa"):
        yield _row(f"{unit}_utilization_ratio", f"utilization/{unit}_util", factor=0.01, moves=0.1)


def _clocks() -> Iterator[Row]:
    for domain, tag in (
        ("graphics", "graphics"),
        ("sm", "sm"),
        ("memory", "mem"),
        ("video", "video"),
    ):
        now, highest = f"clock_hertz{{domain={domain}}}", f"clock_max_hertz{{domain={domain}}}"
        yield _row(now, f"clocks/{tag}_clock", factor=_MHZ, moves=60 * _MHZ)
        yield _row(highest, f"max_clocks/{tag}_clock", factor=_MHZ)


def _power() -> Iterator[Row]:
    own = "gpu_power_readings"
    average = (f"{own}/average_power_draw", f"{own}/power_draw")
    yield _row("power_watts", *average, moves=15.0)
    yield _row("power_instant_watts", f"{own}/instant_power_draw", moves=60.0)
    yield _row("power_limit_watts", f"{own}/current_power_limit")
    yield _row("power_limit_default_watts", f"{own}/default_power_limit")
    yield _row("power_limit_min_watts", f"{own}/min_power_limit")
    yield _row("power_limit_max_watts", f"{own}/max_power_limit")


def _temperatures() -> Iterator[Row]:
    own = "temperature"
    yield _row("temperature_celsius{sensor=gpu}", f"{own}/gpu_temp", moves=3.0)
    yield _row("temperature_celsius{sensor=memory}", f"{own}/memory_temp", moves=3.0)
    yield _row("temperature_margin_celsius", f"{own}/gpu_temp_tlimit", moves=3.0)
    for name, tag in (
        ("shutdown", "gpu_temp_max"),
        ("slowdown", "gpu_temp_slow"),
        ("gpu_max", "gpu_temp_max_gpu"),
        ("memory_max", "gpu_temp_max_mem"),
    ):
        series = f"temperature_threshold_celsius{{threshold={name}}}"
        yield _row(series, f"{own}/{tag}_threshold")
        series = f"temperature_margin_threshold_celsius{{threshold={name}}}"
        yield _row(series, f"{own}/{tag}_tlimit_threshold")


_REASONS = {
    "idle": "gpu_idle",
    "application_clocks": "applications_clocks_setting",
    "sw_power_cap": "sw_power_cap",
    "hw_slowdown": "hw_slowdown",
    "sync_boost": "sync_boost",
    "sw_thermal": "sw_thermal_slowdown",
    "hw_thermal": "hw_thermal_slowdown",
    "hw_power_brake": "hw_power_brake_slowdown",
    "display_clocks": "display_clocks_setting",
}
_TIMED_REASONS = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal": "sw_therm_slowdown",
    "hw_thermal": "hw_therm_slowdown",
    "hw_power_brake": "hw_power_brake",
}


def _throttling() -> Iterator[Row]:
    for reason, tag in _REASONS.items():
        path = f"clocks_event_reasons/clocks_event_reason_{tag}"
        old = f"clocks_throttle_reasons/clocks_throttle_reason_{tag}"
        yield _row(f"throttle_active{{reason={reason}}}", path, old)
    for reason, tag in _TIMED_REASONS.items():
        own = "clocks_event_reasons_counters"
        series = f"throttle_seconds_total{{reason={reason}}}"
        yield _counter(series, f"{own}/{own}_{tag}", factor=1e-6)


def _links() -> Iterator[Row]:
    own = "pci/pci_gpu_link_info"
    # It falls when idle, and waking the GPU up to ask raises it.
    yield _row("pcie_link_generation", f"{own}/pcie_gen/current_link_gen", moves=4.0)
    yield _row("pcie_link_generation_max", f"{own}/pcie_gen/max_link_gen")
    yield _row("pcie_link_width_lanes", f"{own}/link_widths/current_link_width")
    yield _row("pcie_link_width_max_lanes", f"{own}/link_widths/max_link_width")
    yield _counter("pcie_replay_total", "pci/replay_counter")


def _errors() -> Iterator[Row]:
    for name, span in (
        ("ecc_errors_total", "volatile"),
        ("ecc_aggregate_errors_total", "aggregate"),
    ):
        # The newer XML has no totals; without SRAM errors device memory's are the same.
        yield _counter(f"{name}{{type=corrected}}", f"ecc_errors/{span}/dram_correctable")
        yield _counter(f"{name}{{type=uncorrected}}", f"ecc_errors/{span}/dram_uncorrectable")
    own = "remapped_rows"
    yield _row("remapped_rows{type=correctable}", f"{own}/remapped_row_corr")
    yield _row("remapped_rows{type=uncorrectable}", f"{own}/remapped_row_unc")
    yield _row("row_remap_pending", f"{own}/remapped_row_pending")
    yield _row("row_remap_failure", f"{own}/remapped_row_failure")
    for name in REMAP_AVAILABILITIES:
        path = f"{own}/row_remapper_histogram/row_remapper_histogram_{name}"
        yield _row(f"row_remap_banks{{availability={name}}}", path)
    own = "retired_pages"
    retired = f"{own}/multiple_single_bit_retirement/retired_count"
    yield _row("retired_pages{cause=single_bit}", retired)
    retired = f"{own}/double_bit_retirement/retired_count"
    yield _row("retired_pages{cause=double_bit}", retired)
    yield _row("retired_pages_pending", f"{own}/pending_retirement")


def _modes() -> Iterator[Row]:
    yield _row("performance_state", "performance_state")
    yield _row("persistence_mode", "persistence_mode")
    yield _row("mig_mode", "mig_mode/current_mig")
    yield _row("ecc_mode", "ecc_mode/current_ecc")
    yield _row("fan_speed_ratio{fan=0}", "fan_speed", factor=0.01, moves=0.05)
    modes = {"Default": 0, "Prohibited": 2, "Exclusive_Process": 3}
    yield Row("compute_mode", ("compute_mode",), words=tuple(modes.items()))
    actions = {"None": 0, "Reset": 1, "Reboot": 2, "Drain P2P": 3, "Drain and Reset": 4}
    yield Row("recovery_action", ("gpu_recovery_action",), words=tuple(actions.items()))


ROWS: tuple[Row, ...] = (
    *_memory(),
    *_utilization(),
    *_clocks(),
    *_power(),
    *_temperatures(),
    *_throttling(),
    *_links(),
    *_errors(),
    *_modes(),
)
# What describes a device: our label, and nvidia-smi's path.
FACTS = {
    "name": "product_name",
    "driver_version": "driver_version",
    "pci_bus_id": "pci/pci_bus_id",
    "vbios_version": "vbios_version",
    "serial": "serial",
    "architecture": "product_architecture",
}
