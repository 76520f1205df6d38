"""All that is measured of made timelines, as golden files: only fields that are set."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases import cases
from tests.diagnosis.timeline import Timeline
from tests.golden_lines import line
from warpwatch_diagnosis.intervals import total
from warpwatch_diagnosis.measures.measures import plain, trace_json

CASES = cases(__file__)


def lines(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from lines(name, one)
    elif isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values()):
        for key, one in value.items():
            yield from lines(f"{name}.{key}", one)
    else:
        yield line(name, value if isinstance(value, dict) else {"value": value})


@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_of_a_timeline_is_that_of_its_golden_file(name, golden_case):
    case = CASES[name]
    timeline = Timeline(case.get("steps", 1), case.get("step_us", 10_000), case.get("device"))
    for event in case["events"]:
        (method, arguments), *named = event.items()
        getattr(timeline, method)(*arguments, **dict(named))
    measures = timeline.measured()
    document = {
        "label": measures.label,
        **trace_json(measures),
        "work": plain(measures.operators.work),
        "timeline": plain(measures.timeline),
        "compiled": total(measures.host.compiled_spans),
        "savings": plain(measures.savings),
        "lines": {part: plain(found) for part, found in measures.lines.items()},
    }
    if gpu := measures.gpu:
        document |= {"collectives": plain(gpu.collectives), "gaps": plain(gpu.idle_time.worst)}
        document |= {"summary": plain(gpu.kernels), "sizes": plain(gpu.sizes)}
    if cpu := measures.cpu:
        spent = {"read": total(cpu.reading), "saved": total(cpu.saving)}
        document |= {"calls": plain(cpu.calls), **spent}
    golden_case("".join(text for text in lines("trace", document) if text.count(" ")))
