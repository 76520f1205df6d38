"""Every form of device id is read, and what only looks like one is not."""

from __future__ import annotations

import ast

from tests.devices.conftest import Cases
from warpwatch_devices.attribution import device_ids
from warpwatch_devices.attribution.device_ids import (
    DeviceReference,
    parse_cdi_name,
    parse_device_id,
    parse_driver_name,
)


def test_ids_of_every_kind_lead_to_devices_and_lookalikes_to_none(cases: Cases) -> None:
    def parse(text: str) -> DeviceReference | None:
        parser, _, quoted = text.partition(" ")
        found: DeviceReference | None = getattr(device_ids, parser)(ast.literal_eval(quoted))
        return found

    cases("device_ids.txt", parse)
    for parser in (parse_device_id, parse_driver_name, parse_cdi_name):
        assert parser("") is None


def test_an_endless_id_is_refused_without_being_read() -> None:
    assert parse_device_id("nvidia0" + "/gi1" * 1000) is None
    assert parse_cdi_name("nvidia.com/gpu=" + "0" * 100_000) is None
