"""The rows of *Node and GPUs* about links and errors."""

from __future__ import annotations

from warpwatch_dashboards.by_device import as_it_is, by_device, events, per_second
from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import at_least, at_most, graph
from warpwatch_dashboards.queries import DEVICE, series

_GENERATION = series("device_pcie_link_generation", DEVICE)
_GENERATION_MAX = series("device_pcie_link_generation_max", DEVICE)
_LANES = series("device_pcie_link_width_lanes", DEVICE)
_LANES_MAX = series("device_pcie_link_width_max_lanes", DEVICE)
_LINKS_ROW = Row(
    "PCIe and NVLink",
    [
        per_second(
            "PCIe received",
            "Bytes a second from the host: batches, and weights at the start.",
            "device_pcie_receive_bytes_total",
            unit="binBps",
            width=6,
        ),
        per_second(
            "PCIe sent",
            "Bytes a second to the host: checkpoints, and what a program reads back.",
            "device_pcie_transmit_bytes_total",
            unit="binBps",
            width=6,
        ),
        per_second(
            "NVLink received",
            "Bytes a second over all NVLinks. Uneven between the GPUs of a job: look at the "
            "links' errors.",
            "device_nvlink_receive_bytes_total",
            unit="binBps",
            width=6,
        ),
        per_second(
            "NVLink sent",
            "Bytes a second over all NVLinks.",
            "device_nvlink_transmit_bytes_total",
            unit="binBps",
            width=6,
        ),
        graph(
            "PCIe lanes in use",
            "Lanes in use by the most that device and slot allow. Below 100 %: a bad seat, riser "
            "or slot; reseat the GPU.",
            by_device(f"{_LANES} / {_LANES_MAX}", ""),
            unit="percentunit",
            limits=at_least(1),
            width=8,
        ),
        graph(
            "PCIe generation in use",
            "Generation of the link by the highest possible. It falls when idle; low while busy "
            "is a fault.",
            by_device(f"{_GENERATION} / {_GENERATION_MAX}", ""),
            unit="percentunit",
            width=8,
        ),
        graph(
            "NVLinks up",
            "Links that are up. Fewer than the GPU's peers have: the fabric lost one.",
            by_device(series("device_nvlink_links_up", DEVICE), ""),
            width=8,
        ),
        events(
            "PCIe replays",
            "Packets sent again. Some a day are noise; a steady rate is a bad link.",
            "device_pcie_replay_total",
            width=12,
        ),
        events(
            "NVLink errors",
            "Errors over all links by type. crc errors that rise slow the links down; recovery "
            "means that one was restarted.",
            "device_nvlink_errors_total",
            "type",
            width=12,
        ),
    ],
)


_RELIABILITY_ROW = Row(
    "Reliability",
    [
        events(
            "XID errors",
            "What the driver reported, by XID; docs/xids.md says what to do.",
            "device_xid_errors_total",
            "xid",
        ),
        events(
            "Health events",
            "What the driver reported of the device's health besides XIDs.",
            "device_health_events_total",
            "event",
        ),
        events(
            "ECC errors",
            "Corrected ones are normal in small numbers; an uncorrected one ended the process that "
            "used that memory.",
            "device_ecc_errors_total",
            "type",
        ),
        as_it_is(
            "ECC errors in the device's life",
            "By type. They tell how much a device has been through.",
            "device_ecc_aggregate_errors_total",
            "type",
        ),
        as_it_is(
            "Remapped rows",
            "Memory rows replaced by spare ones, by what caused it.",
            "device_remapped_rows",
            "type",
        ),
        as_it_is(
            "Remap failed",
            "1: a row could not be replaced and the device must be.",
            "device_row_remap_failure",
            limits=at_most(1, 1),
        ),
        as_it_is(
            "Remap pending",
            "1: rows wait for the next reset of the device to be replaced.",
            "device_row_remap_pending",
            limits=at_most(1),
        ),
        as_it_is(
            "Recovery asked for",
            "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain peer-to-peer, 4 "
            "drain and reset.",
            "device_recovery_action",
            limits=at_most(1, 2),
        ),
    ],
    width=6,
)


RELIABILITY_ROWS = [_LINKS_ROW, _RELIABILITY_ROW]
