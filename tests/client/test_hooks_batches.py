"""Tests of a batch's samples and tokens, by its shapes."""

import pytest

from warpwatch import faults
from warpwatch.hooks.dataloader import measure
from warpwatch.hooks.hook_state import HookState


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
