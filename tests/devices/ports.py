"""Made /sys trees of RDMA ports, of two real machines' shapes: InfiniBand and RoCE; and EFA."""

import json
from pathlib import Path

BRIDGE = "devices/pci0000:15/0000:15:01.0/0000:16:00.0"
# A ConnectX-7 of a DGX H100: 21 and 26 files, of which these; lifetime counts of a good port.
INFINIBAND, ROCE, EFA = json.loads(Path(__file__).with_name("ports.json").read_text()).values()


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
