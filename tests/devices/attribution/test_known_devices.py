"""Device ids of every form: each means one device of the node, or none, never a guess."""

import ast
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import cases as tables
from tests.conftest import Cases
from tests.devices.attribution.gpus import node, sample
from warpwatch_devices.attribution import device_ids
from warpwatch_devices.attribution.device_ids import DeviceReference, KnownDevices


@pytest.mark.parametrize("case", tables(__file__).values(), ids=tables(__file__))
def test_a_reference_leads_to_one_sampled_device_or_to_none(case: dict[str, Any]) -> None:
    samples = []
    for device in case["devices"]:
        is_lost = device.pop("lost", False)
        found = sample(device.pop("uuid"), device.pop("index"), **device)
        samples.append(replace(found, up=False, reason="lost") if is_lost else found)
    known = KnownDevices(samples)
    for reference, uuid in case["said"]:
        assert known.resolve(DeviceReference(**reference)) == uuid, reference


def test_ids_of_every_kind_lead_to_devices_and_lookalikes_to_none(cases: Cases) -> None:
    devices = KnownDevices(node())

    def parse(text: str) -> str | None:
        parser, _, quoted = text.partition(" ")
        found: DeviceReference | None = getattr(device_ids, parser)(ast.literal_eval(quoted))
        return f"{devices.resolve(found)} by {found}" if found else None

    cases("device_ids.txt", parse)
