"""The devices of the node that the tests play on: two GPUs, the second cut into instances."""

from collections.abc import Mapping

from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample

GPU_0 = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
GPU_1 = "GPU-11111111-aaaa-bbbb-cccc-111111111111"
MIG_3 = "MIG-33333333-aaaa-bbbb-cccc-333333333333"
MIG_7 = "MIG-77777777-aaaa-bbbb-cccc-777777777777"


def sample(
    uuid: str,
    index: int,
    *pids: int,
    gpu_instance: str = "",
    profile: str = "",
    info: Mapping[str, str] | None = None,
) -> DeviceSample:
    device = Device(uuid, index, "NVIDIA H100", gpu_instance, profile, info or {})
    processes = tuple(DeviceProcess(pid, "python") for pid in pids)
    return DeviceSample(device, 1000.0, processes=processes)


def node(*pids_on_gpu_0: int) -> tuple[DeviceSample, ...]:
    return (
        sample(GPU_0, 0, *pids_on_gpu_0),
        sample(GPU_1, 1),
        sample(MIG_3, 1, gpu_instance="3", profile="3g.40gb"),
        sample(MIG_7, 1, gpu_instance="7", profile="1g.10gb"),
    )
