"""The catalogues of metrics and XIDs: complete, named by the rules, and what docs/ says."""

import csv
import re
from pathlib import Path

import pytest

from tests.cases import cases
from warpwatch_telemetry import catalogue, xids
from warpwatch_telemetry.catalogue import CATALOGUE, DCGM_NAMES
from warpwatch_telemetry.metric import IDENTITY_LABELS
from warpwatch_telemetry.xids import TABLE, XIDS

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


def test_every_dcgm_name_stands_for_series_that_we_export() -> None:
    for alias in DCGM_NAMES.values():
        for name, own in alias.series:
            assert len(own) == len(CATALOGUE[name].labels), alias.name


def test_the_table_is_in_order_and_every_entry_says_what_to_do_in_a_cell():
    with TABLE.open(encoding="utf-8", newline="") as file:
        assert [row["number"] for row in csv.DictReader(file)] == [*map(str, sorted(XIDS))]
    for number, xid in XIDS.items():
        assert xid.number == number
        for text in (xid.name, xid.meaning, xid.action):
            assert text and "|" not in text and "\n" not in text and ".." not in text
        assert xid.meaning.endswith(".") and xid.action.endswith(".")


@pytest.mark.parametrize(
    ("name", "generated"), [("metrics", catalogue.markdown), ("xids", xids.markdown)]
)
def test_the_committed_page_is_the_generated_one(name, generated):
    page = Path(__file__).parents[2] / "docs" / f"{name}.md"
    assert page.read_text(encoding="utf-8") == generated()
