"""Keys of earlier versions: refused, with what became of them."""

from __future__ import annotations

_CONSTANT = "was removed: it only tuned the mechanism; the value that was its default is built in"

_BUDGET = "was removed: detection.false_alarms_per_job_day says how far above the noise a limit is"

_REMOVED = {
    "detectors": "is called detection now",
    "http.token_required": "was removed: what changes something needs the token over TCP, always",
}
_CONSTANTS = {
    "anomalies": "max_age max_history",
    "attribution": "interval_s",
    "detection": "warmup_steps",
    "rendezvous": "owner_files poll_interval_s",
    "sources.dcgm": "interval_s",
    "sources.dcgm_exporter": "interval_s",
    "sources.kernel_log": "path",
    "sources.nvml": "gpm",
    "sources.processes": "interval_s",
    "sources.simulated": "interval_s",
    "triggers": "capture_timeout_s max_events other_capture_s",
    "triggers.baseline": "captures_per_day steps",
}
_REMOVED_OF_RECIPES = {
    "options_on_repeat": "was removed: a repeated capture of kind torch records stacks besides",
}
# Of the section of each kind.
_LIMITS_OF_KINDS = {
    "step_regression": "min_effect",
    "step_drift": "min_effect",
    "step_spikes": "min_spike alarm_share",
    "comm_slow": "min_rise min_effect",
    "data_stall": "min_share",
    "straggler": "min_ratio hold_s",
    "gc_pause": "min_share",
}
_CONSTANTS_OF_KINDS = {
    "step_regression": "accept_after_s accept_samples alarm_rate block_s cost_steps peak_factor "
    "sample_s settle_steps",
    "step_drift": "accept_after_s accept_samples alarm_rate anchor_effect sample_s settle_steps",
    "step_spikes": "evidence min_spike_s noise_factor sample_s settle_steps",
    "comm_slow": "accept_after_s accept_samples alarm_rate block_s cost_steps max_compute min_comm "
    "peak_factor sample_s settle_steps",
    "data_stall": "baseline_blocks block_s block_steps long_blocks min_rise noise_factor "
    "ready_blocks short_blocks short_share start_share",
    "straggler": "baseline_blocks drift_blocks drift_ratio hold_ticks min_cost noise_factor "
    "quartile_ratio ready_blocks stage_ratio start_ratio tick_s window_ticks",
    "gc_pause": "max_pause_s max_period_steps min_pauses min_period_steps min_ratio noise_factor "
    "window_s window_steps",
    "hang": "gap_factor median_steps rest_cpu_ratio rest_device_ratio rest_io_bytes_per_s rest_s "
    "spin_power_ratio warmup_steps",
    "memory_leak": "block_steps critical_s hold_blocks min_growth_bytes min_growth_ratio min_late "
    "min_part min_s min_steps noise_factor window_blocks",
    "memory_pressure": "device_share host_share calm_s hold_s idle_reserve release",
    "oom": "grace_s",
    "crash": "grace_s",
    "device_lost": "silent_s clear_s forget_s hold_s unreadable_s",
    "device_stuck": "clear_s",
    "thermal_throttle": "min_share clear_s window_s",
    "power_brake": "min_share clear_s window_s",
    "overheating": "margin_celsius clear_s hold_s release_celsius",
    "clock_drop": "min_drop block_s clear_s hold_s min_utilization ready_blocks",
    "pcie_degraded": "replays_per_minute clear_s hold_s min_utilization",
    "nvlink_error": "crc_per_second clear_s down_s quiet_s",
    "device_idle": "clear_s max_utilization min_memory_share",
}


def what_became(path: str) -> str | None:
    """One line on the key at ``path``; None where there never was such a key."""
    section, _, leaf = path.rpartition(".")
    text = _REMOVED.get(path)
    if leaf in _CONSTANTS.get(section, "").split():
        text = _CONSTANT
    if section.startswith("triggers.recipes."):
        text = _REMOVED_OF_RECIPES.get(leaf)
    elif section.startswith("detection."):
        text = _of_kind(section.removeprefix("detection."), leaf)
    return None if text is None else f"{path}: {text}"


def _of_kind(kind: str, leaf: str) -> str | None:
    if leaf in _LIMITS_OF_KINDS.get(kind, "").split():
        return _BUDGET
    if leaf in _CONSTANTS_OF_KINDS.get(kind, "").split():
        return _CONSTANT
    return _CONSTANT if leaf == "warmup_steps" and kind in _CONSTANTS_OF_KINDS else None
