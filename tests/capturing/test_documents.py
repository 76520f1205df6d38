"""Documents of a child that was taken over by the file it read."""

import json

import pytest

from warpwatch_capturing import store
from warpwatch_capturing.confinement import Ended
from warpwatch_capturing.store import read_diagnosis
from warpwatch_capturing.verification import Expectation, TraceVerdict, verify

WELL = {"verdict": "healthy", "findings": [{"kind": "healthy", "share": 0.1}], "traces": []}


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"verdict": "healthy", "more": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"verdict": "healthy", "findings": "x"}',
        b'{"verdict": "healthy", "findings": [{"kind": "io", "share": 1e300}]}',
        b'{"verdict": "healthy", "traces": [{"roofline": {"mfu_ratio": "1"}}]}',
        b'{"verdict": 7}',
        b"\xff",
    ],
)
def test_a_diagnosis_that_is_not_of_its_form_is_none(tmp_path, content):
    (tmp_path / "diagnosis.json").write_bytes(content)
    assert read_diagnosis(tmp_path) is None


def test_a_diagnosis_that_is_too_long_is_none(tmp_path, monkeypatch):
    content = json.dumps(WELL)
    (tmp_path / "diagnosis.json").write_text(content)
    monkeypatch.setattr(store, "MAX_DIAGNOSIS_BYTES", len(content))
    assert read_diagnosis(tmp_path) == WELL
    monkeypatch.setattr(store, "MAX_DIAGNOSIS_BYTES", len(content) - 1)
    assert read_diagnosis(tmp_path) is None


def test_texts_of_a_diagnosis_are_cleaned(tmp_path):
    document = WELL | {"summary": "\x1b[2J", "extra": {"\n": "kept"}}
    (tmp_path / "diagnosis.json").write_text(json.dumps(document))
    assert read_diagnosis(tmp_path) == WELL | {"summary": " [2J", "extra": {" ": "kept"}}


REFUSED = (None, ("unreadable: exit status 0",))


@pytest.mark.parametrize(
    ("line", "verdict"),
    [('[3, ["no step 7"]]', (3, ("no step 7",))), ("[" * 100_000, REFUSED), ("[1]", REFUSED)]
    + [(line, REFUSED) for line in ('["1", []]', "[-1, []]", '[1, "x"]', "")],
)
def test_a_verdict_on_a_trace_that_is_not_of_its_form_is_refused(tmp_path, line, verdict):
    found = verify(tmp_path, {"t": Expectation(0)}, run=lambda *given: Ended(0, (line,)))
    assert found == {"t": TraceVerdict(*verdict)}
