"""Unions of time, and the longest step, drawn."""

from hypothesis import given
from hypothesis import strategies as st

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.intervals import difference, intersection, total, union

SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=20)


@given(SPANS, SPANS)
def test_set_operations_count_instants(left, right):
    def instants(spans: list[tuple[int, int]]) -> set[int]:
        return {t for begin, size in spans for t in range(begin, begin + size)}

    a = union((float(b), float(b + size)) for b, size in left)
    b = union((float(b), float(b + size)) for b, size in right)
    assert total(a) == len(instants(left))
    assert total(intersection(a, b)) == len(instants(left) & instants(right))
    assert total(difference(a, b)) == len(instants(left) - instants(right))


def test_thousands_of_short_kernels_become_few_spans_of_the_longest():
    timeline = Timeline(step_us=100_000)
    for index in range(5_000):
        name = "ampere_sgemm_128x64_nn" if index % 2 else "vectorized_elementwise_kernel"
        timeline.kernel(20 * index, 1 + index % 2, launched_us=None, name=name)
    found = timeline.measured().timeline
    stream = found.lanes[1]
    assert 1 <= len(stream.spans) <= 2000
    assert {span.label for span in stream.spans} == {"gemm"}
