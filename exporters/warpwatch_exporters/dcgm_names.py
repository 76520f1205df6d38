"""The series of dcgm-exporter's default list, name for name, label for label, unit for unit.

Dashboards and alerts written for dcgm-exporter work on them unchanged; docs/dcgm.md says where
they differ on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from warpwatch_exporters.exposition import escape, header
from warpwatch_exporters.series import workloads_of
from warpwatch_telemetry.dcgm_names import DCGM_NAMES, XID_ERRORS, DcgmName
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import State
from warpwatch_telemetry.xids import explain

_LAST_XID = "device_xid_last_timestamp_seconds"
_XID_COUNT = "device_xid_errors_total"
_ROWS = tuple(row for row in DCGM_NAMES.values() if row.default)


def families(state: State, node: str, *, openmetrics: bool) -> Iterator[str]:
    """Yield each family's header and lines, without a final line feed; ``node`` is Hostname."""
    described = list(_described(state, node or state.hostname))
    for row in _ROWS:
        lines = [
            f"{row.name}{{{labels}{_xid_labels(row, sample)}}} {value}"
            for sample, labels in described
            if (value := _value(row, sample)) is not None
        ]
        if lines:
            yield _header(row, openmetrics) + "\n".join(lines)


def _described(state: State, node: str) -> Iterator[tuple[DeviceSample, str]]:
    """Return the readable devices with labels; a GPU instance appears once."""
    gpus = {s.device.uuid: s.device for s in state.devices}
    seen: set[tuple[str, str]] = set()
    for sample in state.devices:
        device = sample.device
        place = (device.info.get("parent_uuid", device.uuid), device.gpu_instance)
        if sample.up and place not in seen:
            seen.add(place)
            parent = gpus.get(device.info.get("parent_uuid", ""), device)
            yield sample, ",".join(_labels(device, parent, node, state))


def _labels(device: Device, parent: Device, node: str, state: State) -> Iterator[str]:
    yield f'gpu="{device.index}"'
    yield f'UUID="{escape(parent.uuid)}"'
    yield f'pci_bus_id="{escape(parent.info.get("pci_bus_id", ""))}"'
    yield f'device="nvidia{device.index}"'
    yield f'modelName="{escape(parent.name)}"'
    if device.gpu_instance:
        yield f'GPU_I_PROFILE="{escape(device.profile)}"'
        yield f'GPU_I_ID="{escape(device.gpu_instance)}"'
    yield f'Hostname="{escape(node)}"'
    if version := parent.info.get("driver_version"):
        yield f'DCGM_FI_DRIVER_VERSION="{escape(version)}"'
    for workload in workloads_of(device.uuid, state.attributions)[:1]:
        yield f'container="{escape(workload.container)}"'
        yield f'namespace="{escape(workload.namespace)}"'
        yield f'pod="{escape(workload.pod)}"'


def _value(row: DcgmName, sample: DeviceSample) -> str | None:
    """Return the value in DCGM's unit; whole numbers as such, others with six decimals."""
    if row is XID_ERRORS:
        return None if sample.device.gpu_instance else _xid(sample.values)
    values = [sample.values[key] for key in row.series if key in sample.values]
    if len(values) < len(row.series):
        return None
    value = sum(values) * row.factor
    return f"{value:.6f}" if row.decimals else str(round(value))


def _xid(values: Mapping[SeriesKey, float]) -> str | None:
    """Return the newest XID, 0 for none, None if no source watches them."""
    times = {own[0]: value for (name, own), value in values.items() if name == _LAST_XID}
    if times:
        return max(times, key=lambda xid: times[xid])
    return "0" if any(name == _XID_COUNT for name, _ in values) else None


def _xid_labels(row: DcgmName, sample: DeviceSample) -> str:
    if row is not XID_ERRORS:
        return ""
    xid = _xid(sample.values) or "0"
    text = explain(int(xid)).name if xid != "0" else "No Error"
    return f',err_code="{xid}",err_msg="{escape(text)}"'


def _header(row: DcgmName, openmetrics: bool) -> str:
    # OpenMetrics wants ``_total`` at the end of a counter, which these names have not.
    kind = "unknown" if openmetrics and row.kind == "counter" else row.kind
    return header(row.name, kind, row.help, openmetrics=openmetrics)
