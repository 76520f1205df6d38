"""Files with any content: no crash, no verdict on garbage, and one way to read them.

``tests/fuzz`` draws many more.
"""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.diagnosis.trace.odd_traces import ANY_JSON, ELEMENTS, verdict
from warpwatch_diagnosis.trace import files, reader
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.trace.reader import EVENTS, read_trace, trace_members


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=20)
@given(elements=st.lists(ELEMENTS | ELEMENTS | ANY_JSON, max_size=30))
def test_garbage_is_never_called_healthy(folder, elements):
    path = folder / "garbage.json"
    path.write_text(json.dumps(elements))
    assert verdict(path) != "healthy"


@settings(max_examples=40)
@given(
    content=st.fixed_dictionaries({EVENTS: st.lists(ANY_JSON | ELEMENTS, max_size=12)}),
    before=st.dictionaries(st.text(max_size=3), ANY_JSON, max_size=2),
    spaces=st.sampled_from([(None, ","), (0, " , "), (2, ",\n\t")]),
    chunk=st.integers(1, 300),
)
@example(content={EVENTS: [1234, -1.5e3]}, before={"a": 12}, spaces=(None, ","), chunk=1)
def test_elements_are_what_the_standard_decoder_reads(folder, content, before, spaces, chunk):
    path = folder / "same.json"
    document = {**before, **content, "z": [{"a": 1}, {"b": 2}]}
    path.write_text(json.dumps(document, indent=spaces[0], separators=(spaces[1], ":")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", chunk)
        read = list(trace_members(path))
    found = [element for key, several in read if key == EVENTS for element in several]
    others = {key: value for key, value in read if key != EVENTS}
    # Compared as text: NaN differs from itself.
    assert json.dumps(found) == json.dumps(document.pop(EVENTS))
    assert json.dumps(others) == json.dumps(document)


@settings(max_examples=40)
@given(elements=st.lists(ELEMENTS | ELEMENTS | ANY_JSON, max_size=20), chunk=st.integers(1, 2000))
def test_both_decoders_read_the_same(folder, elements, chunk):
    path = folder / "decoders.json"
    path.write_text(json.dumps(elements))
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", chunk)
        read.append(content(path))
        patch.setattr(reader, "decode_elements", files.decode_json)
        read.append(content(path))
    assert read[0] == read[1]


def content(path: Path) -> str:
    """As text: NaN differs from itself."""
    try:
        return repr(read_trace(path))
    except TraceError as error:
        return str(error)
