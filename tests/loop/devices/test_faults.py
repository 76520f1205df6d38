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


def test_a_gpu_that_leaves_and_comes_back_elsewhere_is_the_same_device(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path, gpus=3)
    with device_node(tmp_path, driver) as node:
        wait_all_up(node, 3)
        uuids = {index: device["uuid"] for index, device in devices(node).items()}

        def state() -> dict[str, tuple[bool, str, int]]:
            found = node.get("devices")
            return {d["uuid"]: (d["up"], d["reason"], d["index"]) for d in found}

        driver.set(1, absent=True)
        poll(lambda: state()[uuids[1]][:2] == (False, "lost"), "the missing GPU is lost")
        assert state()[uuids[2]][0]
        driver.set(1, absent=False)
        driver.set(None, order="0,2,1")
        poll(lambda: state()[uuids[1]] == (True, "", 2), "it is back, at another index")
        assert state()[uuids[2]] == (True, "", 1)


def test_mig_instances_come_and_go_while_running(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path, profile="a100", gpus=1)
    with device_node(tmp_path, driver) as node:
        wait_all_up(node, 1)

        def instances() -> list[tuple[str, str]]:
            found = [d for d in node.get("devices") if d["gpu_instance"] and d["up"]]
            return sorted((d["gpu_instance"], d["profile"]) for d in found)

        assert instances() == []
        driver.mig(0, "0=3g.40gb/1/0", "3=1g.10gb/9/0")
        expected = [("1", "3g.40gb"), ("9", "1g.10gb")]
        poll(lambda: instances() == expected, "two instances")
        parent = devices(node)[0]
        assert parent["up"]
        assert "power_watts" in parent["values"]
        driver.mig(0, "1=2g.20gb/5/0")
        poll(lambda: instances() == [("5", "2g.20gb")], "the new layout alone")
        driver.mig_off(0)
        poll(lambda: instances() == [], "no instances")
        poll(lambda: "utilization_ratio" in devices(node)[0]["values"], "whole again")


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
