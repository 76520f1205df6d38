"""FLOPs from recorded shapes, and shapes that are none."""

from __future__ import annotations

from typing import Any

import pytest

from warpwatch_diagnosis.measures.flops import Shape, convolution, shapes_of


@pytest.mark.parametrize(
    ("given", "output", "weight", "flops"),
    [
        ((2, 3, 8, 8), (2, 16, 8, 8), (16, 3, 3, 3), 2 * (2 * 16 * 64) * 27),
        ((2, 8, 8, 8), (2, 16, 8, 8), (16, 1, 3, 3), 2 * (2 * 16 * 64) * 9),
        # Transposed, from 8 x 8 to 16 x 16: the weight is (input channels, output channels, ...).
        ((2, 16, 8, 8), (2, 3, 16, 16), (16, 3, 2, 2), 2 * (2 * 16 * 64) * 12),
    ],
    ids=["plain", "groups", "transposed"],
)
def test_a_convolution_counts_by_the_side_that_its_weight_belongs_to(
    given: Shape, output: Shape, weight: Shape, flops: float
) -> None:
    assert convolution(given, output, weight) == flops


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ([[2, 3], [], [0, 4]], ((2, 3), (), (0, 4))),
        ([[2**50], [10**400], [-1], ["x"], 7], ((), (), (), (), ())),
        ([[0, 2**49, 2**49], [2**25, 2**25]], ((), ())),
        ([[1] * 64, [1] * 65], ((1,) * 64, ())),
        ("[[2, 3]]", ((2, 3),)),
    ],
)
def test_a_shape_beyond_bounds_is_none_even_if_it_is_empty(
    given: Any, shapes: tuple[Shape, ...]
) -> None:
    assert shapes_of({"Input Dims": given}) == shapes
