"""What the DataLoader says: samples, tokens, and steps where no one else can."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy
import pytest

from tests.client.hooked import run_loops
from warpwatch import faults
from warpwatch.hooks.batches import measure

# Loop: step clock, steps, samples, tokens.
LOOPS = {
    # 85 batches, of which 64 show that no optimizer steps; then 10 with one.
    "last_resort": ("dataloader", 21, 84, 0),
    "last_resort_until_an_optimizer_comes": ("optimizer", 31, 124, 0),
    # Ten times 20 batches are none too many.
    "accumulation_of_more_and_more_batches": ("optimizer", 3, 1480, 0),
    "tokens": ("optimizer", 4, 12, 120),
    "one_batch_ahead": ("optimizer", 8, 32, 0),
    "the_users_own_numbers": ("step()", 5, 5000, 0),
    "a_dataset_that_loads_itself": ("optimizer", 2, 2, 0),
    "training_data_that_is_evaluated": ("optimizer", 9, 36, 0),
    "data_that_fails": ("optimizer", 15, 60, 0),
    # The first one came before there was a training thread.
    "batches_that_another_thread_fetches": ("optimizer", 12, 4, 0),
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_loops(tmp_path_factory.mktemp("loops"), *LOOPS)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "expected"), LOOPS.items())
def test_steps_samples_and_tokens(
    reported: dict[str, dict[str, Any]], name: str, expected: tuple[str, int, int, int]
) -> None:
    found = reported[name]
    assert (found["clock"], found["steps"], found["samples"], found["tokens"]) == expected


@pytest.mark.torch
def test_training_data_that_is_evaluated_is_no_forward(reported: dict[str, dict[str, Any]]) -> None:
    phases_s = reported["training_data_that_is_evaluated"]["phases_s"]
    assert phases_s["eval"] >= 2 * 0.02 > phases_s["forward"]


Pair = namedtuple("Pair", "x y")


@pytest.mark.torch
def test_rows_of_ids_are_tokens_and_packed_rows_no_samples() -> None:
    torch = pytest.importorskip("torch")
    ids, numbers = torch.zeros((3, 7), dtype=torch.long), torch.zeros((3, 7))
    row = ids.reshape(1, 21)
    assert measure([ids, ids]) == measure((ids, numbers)) == (3, 21)
    assert measure([numbers, ids]) == measure([ids.byte()]) == (3, 0)
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


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, (4, 0)),
        ([X, Y], (4, 0)),
        ((X, Y), (4, 0)),
        (Pair(X, Y), (4, 0)),
        ({"image": X, "label": Y}, (4, 0)),
        ({"attention_mask": X, "input_ids": IDS}, (4, 40)),
        (UserDict(attention_mask=X, input_ids=IDS), (4, 40)),
        (({"input_ids": IDS}, Y), (4, 40)),
        ({"input_ids": [IDS, IDS]}, (4, 0)),
        ([numpy.float32(1), X], (4, 0)),
        (["a", 3, None, X], (4, 0)),
        (Graph(), (7, 0)),
        ([[[X]]], (4, 0)),
        ([[[[[[X]]]]]], (0, 0)),
        ([1] * 100 + [X], (0, 0)),
        (["a", b"b"], (0, 0)),
        (7, (0, 0)),
        (None, (0, 0)),
        ([], (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_a_batch_is_measured_by_its_shapes(batch: Any, expected: tuple[int, int]) -> None:
    before = faults.count()
    assert measure(batch) == expected
    assert faults.count() == before


def test_a_batch_that_cannot_be_read_counts_nothing() -> None:
    before = faults.count()
    assert measure([Unreadable()]) == (0, 0)
    assert faults.count() == before + 1


def test_a_batch_that_holds_itself_ends() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert measure(batch) == (0, 0)
