"""The judge's figures: their bounds, and their table in the documentation."""

import json
from typing import Any

import pytest

from benchmarks import from_start, judge
from benchmarks.judge import into_document, poisson_upper, table, wilson

MARKERS = "<!-- judge:begin --><!-- judge:end -->"


def case(runs: int, found: int, **more: Any) -> dict[str, Any]:
    known = {"delay_p50": 12, "delay_p95": 30, "misnamed": 0, "false": 0, "rank_hours": 240.0}
    return {"runs": runs, "found": found, **known, **more}


def results() -> dict[str, Any]:
    summary = {"precision": 0.9, "f1": 0.95, "misnamed": 0}
    cases = {
        "sim/none": case(24, 0, delay_p50=None, delay_p95=None, false=1),
        "sim/shift10": case(24, 22), "sim/hang": case(24, 24, delay_p50=140.0, delay_p95=141.5),
        "real/none": case(10, 0, delay_p50=None, delay_p95=None),
        "real/shift10%": case(40, 38, false=2),
    }  # fmt: skip
    summaries = {"sim": summary, "real": summary}
    return {"warpwatch": {"seeds": 24, "first_seed": 0, "cases": cases, "summary": summaries}}


def test_a_share_has_wilsons_interval_and_no_event_at_all_leaves_room_for_three() -> None:
    assert wilson(24, 24) == pytest.approx((0.862, 1.0), abs=0.001)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=0.001)
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=0.001)
    assert poisson_upper(0) == pytest.approx(2.9957, abs=0.001)
    assert poisson_upper(10) == pytest.approx(16.962, abs=0.001)
    assert poisson_upper(500) == pytest.approx(538.4, abs=0.5)


def test_a_table_is_written_between_its_markers_alone() -> None:
    begin, end = "<!-- judge:begin -->", "<!-- judge:end -->"
    document = into_document(f"before{begin}old{end}after", "new")
    assert document == f"before{begin}\nnew\n{end}after"
    with pytest.raises(ValueError, match="judge:begin"):
        into_document("no markers", "new")


def test_the_table_in_the_documentation_is_that_of_the_kept_figures() -> None:
    document = judge.DOCUMENT.read_text()
    assert into_document(document, table(json.loads(judge.RESULTS.read_text()))) == document


# A judge that always prints the same figures and records its arguments.
STAND_IN = """
import json, pathlib, sys
with pathlib.Path(__file__).with_name("arguments").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
print(pathlib.Path(__file__).with_name("answer.json").read_text())
"""


def test_figures_are_kept_and_written_into_the_documentation(monkeypatch, tmp_path, capsys):
    (tmp_path / "steps.py").write_text(STAND_IN)
    answer = {key: results()["warpwatch"][key] for key in ("cases", "summary")}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    (tmp_path / "detection.md").write_text(MARKERS)
    monkeypatch.setattr(judge, "RESULTS", tmp_path / "results/judge.json")
    monkeypatch.setattr(judge, "DOCUMENT", tmp_path / "detection.md")
    monkeypatch.setattr(from_start, "RANKS", (8,))
    monkeypatch.setattr(from_start, "UNEVEN", {"stages": from_start.stages})
    monkeypatch.setattr("sys.argv", ["judge", "--seeds", "1"])
    assert judge.main() == 2
    assert capsys.readouterr().err == (
        "judge: WARPWATCH_EVALUATION must name the evaluation folder, in which steps.py is\n"
    )
    monkeypatch.setenv(judge.EVALUATION, str(tmp_path))
    assert judge.main() == 0
    assert "--seeds 1 --first-seed 0 --jobs 2" in (tmp_path / "arguments").read_text()
    document = (tmp_path / "detection.md").read_text()
    assert "| start/slow20% | 2 | 1.00 (0.34 to 1.00) | 27 | 27 | 0 | 0 |" in document
    assert "| start/stages/none | 2 | - | - | - | 0 | 0 |" in document
