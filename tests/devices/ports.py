"""Made /sys trees of RDMA ports, of two real machines' shapes: InfiniBand and RoCE; and EFA."""

from __future__ import annotations

from pathlib import Path

BRIDGE = "devices/pci0000:15/0000:15:01.0/0000:16:00.0"
# A ConnectX-7 of a DGX H100: 21 and 26 files, of which these; lifetime counts of a good port.
INFINIBAND = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "counters/port_rcv_data": "5048376321",
    "counters/port_xmit_data": "4964083561",
    "counters/port_xmit_wait": "2488743201",
    "counters/port_rcv_errors": "14",
    "counters/symbol_error": "0",
    "counters/link_downed": "0",
    "counters/local_link_integrity_errors": "15",
    "counters/VL15_dropped": "N/A (no PMA)",
    "hw_counters/roce_adp_retrans": "3",
    "hw_counters/out_of_sequence": "0",
}
ROCE = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "200 Gb/sec (4X HDR)",
    "link_layer": "Ethernet",
    "counters/port_rcv_data": "100",
    "counters/link_downed": "0",
    "hw_counters/np_ecn_marked_roce_packets": "918",
    "hw_counters/np_cnp_sent": "918",
    "hw_counters/rp_cnp_handled": "7",
    "hw_counters/local_ack_timeout_err": "2",
}
EFA = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "link_layer": "Unspecified",
    "hw_counters/rx_bytes": "4096",
    "hw_counters/tx_bytes": "8192",
    "hw_counters/rx_drops": "1",
}


def make(sys: Path, device: str, files: dict[str, str], bus: str) -> Path:
    """As the kernel has it: the class's folder holds a link to the PCI device's."""
    pci = sys / bus
    port = sys / "class/infiniband" / device / "ports/1"
    for name, text in files.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text + "\n")
    pci.mkdir(parents=True, exist_ok=True)
    for name, text in (("hca_type", "MT4129"), ("fw_ver", "28.39.1002")):
        (port.parents[1] / name).write_text(text + "\n")
    link = port.parents[1] / "device"
    if not link.exists():
        link.symlink_to(pci)
    return port
