"""Tests of a batch's samples and tokens, by its shapes."""

from collections import UserDict, namedtuple
from typing import Any

import numpy
import pytest

from warpwatch import faults
from warpwatch.hooks.dataloader import measure
from warpwatch.hooks.hook_state import HookState

Pair = namedtuple("Pair", "x y")


@pytest.mark.torch
def test_rows_of_ids_are_tokens_and_packed_rows_no_samples() -> None:
    torch = pytest.importorskip("torch")
    ids, numbers = torch.zeros((3, 7), dtype=torch.long), torch.zeros((3, 7))
    row = ids.reshape(1, 21)
    assert measure([ids, ids]) == measure((ids, numbers)) == (3, 21)
    assert measure([numbers, ids]) == measure([ids.byte()]) == measure([ids[..., None]]) == (3, 0)
    assert measure({"input_ids": ids, "position_ids": ids}) == (3, 21)
    assert measure({"input_ids": row, "cu_seq_lens_q": torch.tensor([0, 4, 21])}) == (2, 21)
    assert measure({"input_ids": row, "position_ids": row}) == (0, 21)


class Graph:
    def __init__(self) -> None:
        self.name = "a batch of graphs"
        self.nodes = numpy.zeros((7, 3))


class Unreadable:
    @property
    def shape(self) -> Any:
        raise RuntimeError("not now")


X, Y, IDS = numpy.zeros((4, 8)), numpy.zeros(4), numpy.zeros((4, 10))
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, (4, 0)), ([X, Y], (4, 0)), ((X, Y), (4, 0)), (Pair(X, Y), (4, 0)),
        ({"image": X, "label": Y}, (4, 0)), ({"attention_mask": X, "input_ids": IDS}, (4, 40)),
        (UserDict(attention_mask=X, input_ids=IDS), (4, 40)), (({"input_ids": IDS}, Y), (4, 40)),
        ({"input_ids": [IDS, IDS]}, (4, 0)), ([numpy.float32(1), X], (4, 0)),
        (["a", 3, None, X], (4, 0)), (Graph(), (7, 0)), ([[[[X]]]], (4, 0)), ([[[[[X]]]]], (0, 0)),
        ([1] * 7 + [X], (4, 0)), ([1] * 8 + [X], (0, 0)), (["a", b"b"], (0, 0)), (7, (0, 0)),
        (None, (0, 0)), ([], (0, 0)), ({}, (0, 0)), (ITSELF, (0, 0)),
    ],
)  # fmt: skip
def test_a_batch_is_measured_by_its_shapes(batch: Any, expected: tuple[int, int]) -> None:
    before = faults.count()
    assert measure(batch) == expected
    assert faults.count() == before


def test_a_batch_that_cannot_be_read_counts_nothing() -> None:
    before = faults.count()
    assert measure([Unreadable()]) == (0, 0)
    assert faults.count() == before + 1


def test_each_kind_of_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "warpwatch")
    for text in ("one kind", "another kind", "one kind"):
        faults.swallow(ValueError(text))
        faults.log_pending()
    heads = [record.getMessage().partition("\n")[0] for record in caplog.records]
    known = ["internal error: ValueError: one kind", "internal error: ValueError: another kind"]
    assert [head for head in heads if head.endswith("kind")] == known


@pytest.mark.parametrize("compiles_first", [True, False])
def test_what_fails_when_torch_compile_is_first_used_is_caught(compiles_first: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a mistake of the shim")

    state = HookState()
    state.compiles = compiles_first
    before = faults.count()
    state.when_compiling(fail)
    state.compile()
    assert faults.count() == before + 1
