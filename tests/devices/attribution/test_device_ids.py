"""Every form of device id is read, and what only looks like one is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices.attribution.gpus import GPU_0, MIG_7
from warpwatch_devices.attribution.device_ids import (
    DeviceReference,
    parse_cdi_name,
    parse_device_id,
    parse_driver_name,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GPU_0, DeviceReference(uuid=GPU_0)),
        (MIG_7, DeviceReference(uuid=MIG_7)),
        (f"{GPU_0}::3", DeviceReference(uuid=GPU_0, shared=True)),
        (f"{MIG_7}::0", DeviceReference(uuid=MIG_7, shared=True)),
        (f"MIG-{GPU_0}/7/0", DeviceReference(uuid=GPU_0, gpu_instance="7")),
        ("nvidia3", DeviceReference(minor=3)),
        ("nvidia0/gi7", DeviceReference(minor=0, gpu_instance="7")),
        ("nvidia0/vgpu1", DeviceReference(minor=0, shared=True)),
        ("nvidia12/gi7/vgpu0", DeviceReference(minor=12, gpu_instance="7", shared=True)),
    ],
)
def test_ids_of_device_plugins(text: str, expected: DeviceReference) -> None:
    assert parse_device_id(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GPU-1",
        f"{GPU_0}-3",
        f"{GPU_0}::",
        f"{GPU_0}\n",
        f" {GPU_0}",
        f"{GPU_0}::٣",
        "nvidia",
        "nvidia0/gi",
        "nvidia99999",
        "nvidiactl",
        "0",
        "amd0",
        "0000:1a:00.0",
    ],
)
def test_what_only_looks_like_an_id_is_none(text: str) -> None:
    assert parse_device_id(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu-5", DeviceReference(minor=5, shared=True)),
        (
            "gpu-0-mig-1g10gb-19-4",
            DeviceReference(minor=0, profile="1g10gb", placement=4, shared=True),
        ),
        (
            "gpu-1-mig-1g10gb-me-20-0",
            DeviceReference(minor=1, profile="1g10gb-me", placement=0, shared=True),
        ),
        ("gpu-vfio-0", None),
        ("gpu-0-mig-19-4-1", None),
        ("imex-channel-0", None),
    ],
)
def test_names_of_the_driver_for_dynamic_resources(
    text: str, expected: DeviceReference | None
) -> None:
    assert parse_driver_name(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"nvidia.com/gpu={GPU_0}", DeviceReference(uuid=GPU_0, shared=True)),
        (f"nvidia.com/gpu={MIG_7}", DeviceReference(uuid=MIG_7, shared=True)),
        ("nvidia.com/gpu=0", DeviceReference(index=0, shared=True)),
        ("nvidia.com/gpu=gpu1", DeviceReference(index=1, shared=True)),
        ("nvidia.com/gpu=1:0", DeviceReference(index=1, mig_index=0, shared=True)),
        ("nvidia.com/gpu=mig1:2", DeviceReference(index=1, mig_index=2, shared=True)),
        ("k8s.gpu.nvidia.com/device=gpu-2", DeviceReference(minor=2, shared=True)),
        (
            "k8s.gpu.nvidia.com/claim=1c178021-5860-4495-a1ab-f9ac17877672-gpu-2",
            DeviceReference(minor=2, shared=True),
        ),
        ("nvidia.com/gpu=all", None),
        ("vendor.example/gpu=0", None),
        ("", None),
    ],
)
def test_names_of_the_container_device_interface(
    text: str, expected: DeviceReference | None
) -> None:
    assert parse_cdi_name(text) == expected


@given(st.text(max_size=700))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parse in (parse_device_id, parse_driver_name, parse_cdi_name):
        reference = parse(text)
        assert (
            reference is None
            or reference.uuid
            or reference.index is not None
            or (reference.minor is not None)
        )


@given(st.uuids(), st.integers(0, 9999), st.integers(0, 9999))
def test_every_uuid_survives_with_a_replica_or_an_instance(
    uuid: object, replica: int, gpu_instance: int
) -> None:
    gpu = f"GPU-{uuid}"
    shared = parse_device_id(f"{gpu}::{replica}")
    assert shared == DeviceReference(uuid=gpu, shared=True)
    old = parse_device_id(f"MIG-{gpu}/{gpu_instance}/0")
    assert old == DeviceReference(uuid=gpu, gpu_instance=str(gpu_instance))


def test_an_endless_id_is_refused_without_being_read() -> None:
    assert parse_device_id("nvidia0" + "/gi1" * 1000) is None
    assert parse_cdi_name("nvidia.com/gpu=" + "0" * 100_000) is None
