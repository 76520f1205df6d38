"""The driver comes, goes and is upgraded while the daemon runs."""

import re
import shutil
import subprocess

from tests.devices.fakenvml.driver import LIBRARY, FakeDriver
from tests.loop.devices.node import device_node, devices, reasons, wait_all_up
from tests.loop.node import poll
from tests.waiting import DEADLINE_S
from warpwatch_telemetry.catalogue import CATALOGUE

# Metrics of a device that need no call of the driver.
COUNTED_BY_THE_DAEMON = {"xid_errors_total", "health_events_total"}


def test_series_come_with_the_driver_and_go_with_it(fake_nvml, tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    driver = FakeDriver(folder, tmp_path, gpus=2)
    with device_node(tmp_path, driver) as node:
        assert node.metric("warpwatch_source_up", source="nvml") == 0
        ready = node.http.get("/readyz")
        assert ready.status_code == 503
        assert f"{LIBRARY} not found" in ready.text
        (folder / LIBRARY).symlink_to(fake_nvml / LIBRARY)
        wait_all_up(node, 2)
        assert node.http.get("/readyz").status_code == 200
        check_page(node.http.get("/metrics").text)
        driver.set(None, driver_gone=True)
        gone = {0: "driver", 1: "driver"}
        poll(lambda: reasons(node) == gone, "both are down with the driver")
        known = {name for device in devices(node).values() for name in device["values"]}
        assert {name.partition("{")[0] for name in known} <= COUNTED_BY_THE_DAEMON
        driver.clear()
        wait_all_up(node, 2)


def check_page(page: str) -> None:
    """Check that the catalogue has every metric, and that promtool has nothing to say."""
    names = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    assert names <= {row.full_name for row in CATALOGUE.values()}
    if promtool := shutil.which("promtool"):
        command = [promtool, "check", "metrics"]
        checked = subprocess.run(command, input=page.encode(), capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, b"")


def test_after_an_upgrade_the_daemon_ends_with_a_clear_line(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path, gpus=2)
    with device_node(tmp_path, driver) as node:
        wait_all_up(node, 2)
        driver.set(None, version_mismatch=True)
        daemon = node.daemon
        assert daemon.wait(DEADLINE_S) == 3
        last = node.log("daemon").strip().splitlines()[-1]
        assert "driver was upgraded" in last
        assert "restart" in last
