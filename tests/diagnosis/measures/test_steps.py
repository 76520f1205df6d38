"""Unions of time."""

from hypothesis import given
from hypothesis import strategies as st

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
