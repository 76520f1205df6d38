"""Documents of a child that was taken over by the file it read."""

import json

import pytest

from warpwatch_capturing.children import documents
from warpwatch_capturing.children.documents import read_diagnosis

WELL = {"verdict": "healthy", "findings": [{"kind": "healthy", "share": 0.1}], "traces": []}


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"verdict": "healthy", "more": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"verdict": "healthy", "findings": "x"}',
        b'{"verdict": "healthy", "findings": ["x"]}',
        b'{"verdict": "healthy", "findings": [{"kind": "io", "share": 1e300}]}',
        b'{"verdict": "healthy", "findings": [{"kind": "io", "share": NaN}]}',
        b'{"verdict": "healthy", "traces": [{"roofline": {"mfu_ratio": "1"}}]}',
        b'{"verdict": 7}',
        b"[]",
        b"\xff",
    ],
)
def test_a_diagnosis_that_is_not_of_its_form_is_none(tmp_path, content):
    (tmp_path / "diagnosis.json").write_bytes(content)
    assert read_diagnosis(tmp_path) is None


def test_a_diagnosis_that_is_too_long_is_none(tmp_path, monkeypatch):
    content = json.dumps(WELL)
    (tmp_path / "diagnosis.json").write_text(content)
    monkeypatch.setattr(documents, "MAX_BYTES", len(content))
    assert read_diagnosis(tmp_path) == WELL
    monkeypatch.setattr(documents, "MAX_BYTES", len(content) - 1)
    assert read_diagnosis(tmp_path) is None


def test_texts_of_a_diagnosis_are_cleaned(tmp_path):
    document = WELL | {"summary": "\x1b[2J", "extra": {"\n": "kept"}}
    (tmp_path / "diagnosis.json").write_text(json.dumps(document))
    assert read_diagnosis(tmp_path) == WELL | {"summary": " [2J", "extra": {" ": "kept"}}


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", '["1", []]', "[-1, []]", '[1, "x"]', ""])
def test_a_verdict_on_a_trace_that_is_not_of_its_form_is_refused(line):
    with pytest.raises(ValueError):
        documents.verified(line)
    assert documents.verified('[3, ["no step 7"]]') == (3, ("no step 7",))
