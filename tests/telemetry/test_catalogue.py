"""The catalogues of metrics and XIDs: complete, named by the rules, and what docs/ says."""

import csv
import re
from pathlib import Path

from tests.cases import cases
from warpwatch_telemetry import xids
from warpwatch_telemetry.catalogue import CATALOGUE, DCGM_NAMES, markdown
from warpwatch_telemetry.metric import IDENTITY_LABELS
from warpwatch_telemetry.xids import COUNTED_FROM_START, TABLE, XIDS, explain

ROWS = list(CATALOGUE.values())


def test_every_promised_name_has_its_labels() -> None:
    for promised in cases(__file__)["promised"].split():
        name, _, labels = promised.rstrip("}").partition("{")
        wanted = tuple(labels.split(",")) if labels else ()
        assert name == "device_up" or CATALOGUE[name].labels == wanted, name


def test_names_follow_the_rules() -> None:
    for row in ROWS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", row.name)
        assert (row.kind == "counter") == row.name.endswith("_total"), row.name
        assert not row.unit or row.name.removesuffix("_total").endswith(f"_{row.unit}"), row.name
        assert row.scope in IDENTITY_LABELS
        assert len(set(row.all_labels)) == len(row.all_labels), row.name
        assert "job" not in row.all_labels
        assert row.help.endswith(".") and row.origin, row.name
    assert [row.name for row in ROWS] == list(CATALOGUE)


def test_every_dcgm_name_stands_for_series_that_we_export_in_its_own_unit() -> None:
    for alias in DCGM_NAMES.values():
        for name, own in alias.series:
            assert len(own) == len(CATALOGUE[name].labels), alias.name
    units = {"DEV_GPU_UTIL": 100.0, "DEV_FB_USED": 1 / 2**20, "PROF_PIPE_TENSOR_ACTIVE": 1.0}
    units |= {"DEV_TOTAL_ENERGY_CONSUMPTION": 1000.0, "DEV_SM_CLOCK": 1e-6}
    assert {name: DCGM_NAMES[f"DCGM_FI_{name}"].factor for name in units} == units


def test_the_committed_page_is_the_generated_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == markdown()


DOCUMENT = Path(__file__).parents[2] / "docs" / "xids.md"


def test_every_xid_that_an_operator_meets_is_explained():
    met = [
        *(13, 31, 32, 38, 43, 44, 45, 48, 54, 56, 57, 58, *range(61, 70), 73, 74, *range(76, 82)),
        *(92, 93, 94, 95, 96, 97, 98, 99, 109, 110, 119, 120, 121, 122, 123, 125, 126, 136, 137),
        *(140, 143, *range(144, 151), 154, 155, 156, 157),
    ]
    assert [number for number in met if number not in XIDS] == []


def test_the_table_is_in_order_and_every_entry_says_what_to_do_in_a_cell():
    with TABLE.open(encoding="utf-8", newline="") as file:
        assert [row["number"] for row in csv.DictReader(file)] == [*map(str, sorted(XIDS))]
    for number, xid in XIDS.items():
        assert xid.number == number
        for text in (xid.name, xid.meaning, xid.action):
            assert text and "|" not in text and "\n" not in text and ".." not in text
        assert xid.meaning.endswith(".") and xid.action.endswith(".")


def test_the_cause_of_the_best_known_xids_is_named():
    assert explain(79).name == "GPU has fallen off the bus"
    blames = {"application": (13, 31, 43), "hardware": (48, 74, 79, 95)}
    for blame, numbers in (blames | {"thermal_power": (54,), "driver": (119,)}).items():
        assert {explain(number).blame for number in numbers} == {blame}
    unknown = explain(4711)
    assert (unknown.number, unknown.blame, unknown.severity) == (4711, "unknown", "warning")


def test_counters_begin_at_0_only_for_trouble_with_the_hardware():
    assert {48, 74, 79, 94, 95} <= set(COUNTED_FROM_START)
    assert not {13, 31, 43, 45, 63, 119, 154} & set(COUNTED_FROM_START)


def test_the_document_is_up_to_date():
    expected = "python -m warpwatch_telemetry.xids > docs/xids.md"
    assert DOCUMENT.read_text(encoding="utf-8") == xids.markdown(), f"run {expected}"
