"""Who uses a GPU that pods share: from the driver's processes to the panel's expression."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.dashboards.conftest import Promtool
from tests.dashboards.expressions import dashboards, expressions
from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_stepping import Stepper, stepping
from warpwatch_devices.attribution.control_groups import owner_of
from warpwatch_devices.attribution.device_processes import DeviceProcessesOrigin
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.attribution import Attribution, Pod, ProcessOwner
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample
from warpwatch_telemetry.state import State

TRAINING, NOTEBOOK = (f"{digit * 8}-2a99-45ad-af94-d91eb81a87e9" for digit in "12")
# Two processes of the training, one of the notebook.
PODS = {4000001: TRAINING, 4000002: TRAINING, 4000003: NOTEBOOK}
NAMES = {TRAINING: Pod("ml", "llama-0"), NOTEBOOK: Pod("web", "notebook")}
LOAD, OF_LOAD = 60, 0.15


@pytest.fixture
def process(fake_nvml: Path, tmp_path: Path) -> Iterator[Stepper]:
    with stepping(FakeDriver(fake_nvml, tmp_path / "driver", gpus=1)) as stepper:
        yield stepper


def owner(pid: int, name: str) -> ProcessOwner | None:
    group = f"0::/kubepods/pod{PODS[pid]}/{'a' * 64}\n" if pid in PODS else "0::/user.slice\n"
    return owner_of(group, name)


def page(process: Stepper) -> list[str]:
    gpu = process.gpu
    used = tuple(DeviceProcess(*one) for one in gpu["processes"])
    sample = DeviceSample(Device(gpu["device"], 0, gpu["name"]), time.time(), processes=used)
    found = DeviceProcessesOrigin(read=owner, host_processes=lambda: True).read([sample], 1.0)
    pods = Attribution("kubelet", 1.0, pods=NAMES)
    state = State(1.0, "1", "gpu-1", devices=(sample,), attributions=(*found.attributions, pods))
    lines = render(state, Options(profile="default")).decode().splitlines()
    return [line for line in lines if line.startswith("warpwatch_process")]


def test_the_use_of_a_gpu_is_that_of_the_pods_of_its_processes(
    process: Stepper, promtool: Promtool, tmp_path: Path
) -> None:
    fake = process.begin("h100", load=LOAD)
    # The fourth is of no pod.
    fake.processes(0, *(f"{pid}/1000/C" for pid in (*PODS, 4000004)))
    time.sleep(0.4)
    process.step(60)
    uuid = process.gpu["device"]
    (panel,) = (
        one.promql for one in expressions(dashboards()["node"]) if "GPU use by pod" in one.where
    )
    of = f'gpu="0", uuid="{uuid}"'
    expected = {
        f'{{{of}, namespace="ml", pod="llama-0"}}': 2 * OF_LOAD,
        f'{{{of}, namespace="web", pod="notebook"}}': OF_LOAD,
        f"{{{of}}}": OF_LOAD,
    }
    inputs = [
        {"series": line.rpartition(" ")[0], "values": line.rpartition(" ")[2]}
        for line in page(process)
    ]
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    check = {"expr": f"round({panel}, 0.001)", "eval_time": "0m", "exp_samples": samples}
    case = {"interval": "1m", "input_series": inputs, "promql_expr_test": [check]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    done = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
