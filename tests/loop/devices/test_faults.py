"""One broken GPU breaks nothing else: the others go on, and what is broken says why."""

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node, devices, lines_of, readings, reasons, wait_all_up
from tests.loop.node import poll

XID_ERRORS = "warpwatch_device_xid_errors_total"
BROKEN = {3: "lost", 5: "stuck", 6: "no_permission"}


def test_lost_stuck_and_forbidden_gpus_cost_the_other_five_nothing(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path)
    with device_node(tmp_path, driver) as node:
        wait_all_up(node, 8)
        uuids = {index: device["uuid"] for index, device in devices(node).items()}
        # Its events are watched from a thread of their own, some time after the first reading.
        lost = {"gpu": "3", "uuid": uuids[3], "xid": "79"}
        poll(lambda: node.metric(XID_ERRORS, **lost) == 0, "XIDs are watched")
        driver.set(3, lost=True)
        driver.hang(gpu=5)
        driver.set(6, no_permission=True)
        poll(lambda: reasons(node) == BROKEN, "the three are down, each with its reason")
        lines, others = lines_of(tmp_path), {uuids[index] for index in (0, 1, 2, 4, 7)}

        def go_on() -> bool:
            counts = readings(tmp_path, lines)
            return all(counts[uuid] >= 20 for uuid in others)

        poll(go_on, "the other five are read on")
        assert set(readings(tmp_path, lines)) == others
        for index, reason in BROKEN.items():
            labels = {"gpu": str(index), "uuid": uuids[index], "reason": reason}
            assert node.metric("warpwatch_device_up", **labels) == 0
            assert node.metric("warpwatch_device_power_watts", uuid=uuids[index]) is None
        # An XID is known without asking the GPU that it took away.
        assert node.metric(XID_ERRORS, **lost) == 1
        driver.clear()
        wait_all_up(node, 8)
        assert devices(node)[3]["uuid"] == uuids[3]


def test_gpus_whose_addresses_cannot_be_read_keep_their_xids_apart(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path, gpus=2)
    driver.fail("nvmlDeviceGetPciInfo_v3", 3)
    with device_node(tmp_path, driver) as node:
        wait_all_up(node, 2)

        def count(gpu: int) -> float | None:
            return node.metric("warpwatch_device_xid_errors_total", gpu=str(gpu), xid="48")

        poll(lambda: count(0) == count(1) == 0, "both are watched")
        driver.xid(1, 48)
        poll(lambda: count(1) == 1, "the XID is counted")
        assert count(0) == 0
