"""Device ids of every form: each means one device of the node, or none, never a guess."""

import ast
from dataclasses import replace

from tests.conftest import Cases
from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_7, node, sample
from warpwatch_devices.attribution import device_ids
from warpwatch_devices.attribution.device_ids import (
    DeviceReference,
    KnownDevices,
    parse_cdi_name,
    parse_device_id,
    parse_driver_name,
)

DEVICES = KnownDevices(node())


def test_a_lost_gpu_does_not_stand_in_the_way_of_the_one_that_took_its_index() -> None:
    lost = replace(sample(GPU_0, 3), up=False, reason="lost")
    devices = KnownDevices((lost, sample(GPU_1, 3)))
    assert devices.resolve(DeviceReference(index=3)) == GPU_1
    # One that cannot be sampled keeps its UUID.
    assert KnownDevices(()).resolve(DeviceReference(uuid=GPU_0)) == GPU_0


def test_a_minor_number_is_not_the_index() -> None:
    swapped = KnownDevices(
        (
            sample(GPU_0, 0, info={"minor_number": "1"}),
            sample(GPU_1, 1, info={"minor_number": "0"}),
            sample(MIG_7, 1, gpu_instance="7", profile="1g.10gb"),
        )
    )
    assert swapped.resolve(DeviceReference(minor=0)) == GPU_1
    assert swapped.resolve(DeviceReference(minor=0, gpu_instance="7")) == MIG_7
    assert swapped.resolve(DeviceReference(index=0)) == GPU_0


def test_equal_instances_are_kept_apart_by_their_place_or_not_at_all() -> None:
    reference = parse_driver_name("gpu-0-mig-1g10gb-19-4")
    assert reference is not None
    for known, found in ((True, "MIG-4"), (False, None)):
        places = {start: {"placement_start": start} if known else {} for start in ("2", "4")}
        parts = (
            sample(f"MIG-{start}", 0, gpu_instance=start, profile="1g.10gb", info=info)
            for start, info in places.items()
        )
        assert KnownDevices(parts).resolve(reference) == found


def test_an_instance_is_found_by_its_index_where_the_source_tells_it() -> None:
    part = sample(MIG_7, 1, gpu_instance="7", info={"mig_index": "2"})
    devices = KnownDevices((*node()[:2], part))
    assert devices.resolve(DeviceReference(index=1, mig_index=2)) == MIG_7
    assert devices.resolve(DeviceReference(index=1, mig_index=1)) is None


def test_ids_of_every_kind_lead_to_devices_and_lookalikes_to_none(cases: Cases) -> None:
    def parse(text: str) -> str | None:
        parser, _, quoted = text.partition(" ")
        found: DeviceReference | None = getattr(device_ids, parser)(ast.literal_eval(quoted))
        return f"{DEVICES.resolve(found)} by {found}" if found else None

    cases("device_ids.txt", parse)
    for parser in (parse_device_id, parse_driver_name, parse_cdi_name):
        assert parser("") is None


def test_an_endless_id_is_refused_without_being_read() -> None:
    assert parse_device_id("nvidia0" + "/gi1" * 1000) is None
    assert parse_cdi_name("nvidia.com/gpu=" + "0" * 100_000) is None
