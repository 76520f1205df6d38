"""How much a batch of data holds, by the shapes of its tensors: no value is read."""

from __future__ import annotations

from itertools import islice
from typing import Any

from warpwatch import faults

# A batch of a batch of a batch, and the items of each that are looked at.
MAX_DEPTH = 4
MAX_ITEMS = 8
TOKENS = "input_ids"
_TOKEN_TYPES = ("torch.int64", "torch.int32")
# Beside packed sequences: where each begins, one more than there are; how the tokens are numbered.
BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")
POSITIONS = "position_ids"


def measure(batch: Any, dimension: int = 0) -> tuple[int, int]:
    """(samples, tokens): the length of the first tensor, and the size of ``input_ids``.

    ``dimension``: which one of a tensor of several is the batch's, 1 where time comes first. 0
    where that is not known. Never raises.
    """
    try:
        # What most batches are, in few words.
        first = batch[0] if batch.__class__ is list and batch else batch
        shape = getattr(first, "shape", None)
        if shape:
            samples = shape[dimension if len(shape) > 1 else 0]
            if samples.__class__ is int:
                return samples, _tokens(first, shape)
        return _measure(batch, 0, dimension) or (0, 0)
    except Exception as error:
        faults.swallow(error)
        return 0, 0


def _measure(batch: Any, depth: int, dimension: int = 0) -> tuple[int, int] | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        found = _of_shape(shape[dimension:] if len(shape) > 1 else shape)
        return found and (found[0], _tokens(batch, shape))
    if isinstance(batch, (tuple, list)):
        items: Any = batch
    else:
        if isinstance(batch, (str, bytes)):
            return None
        # A dictionary, what behaves like one, or an object with tensors.
        fields = batch if hasattr(batch, "keys") else getattr(batch, "__dict__", None)
        if not fields:
            return None
        if TOKENS in fields:
            return _of_packed(fields, _of_tokens(fields[TOKENS]))
        items = fields.values()
    if depth < MAX_DEPTH:
        for item in islice(items, MAX_ITEMS):
            found = _measure(item, depth + 1, dimension)
            if found is not None:
                return found
    return None


def _tokens(tensor: Any, shape: Any) -> int:
    """Rows of whole numbers of four bytes or more are token ids."""
    if len(shape) != 2 or shape[1].__class__ is not int:
        return 0
    kind = str(getattr(tensor, "dtype", ""))
    return shape[0] * shape[1] if kind in _TOKEN_TYPES else 0


def _of_shape(shape: Any) -> tuple[int, int] | None:
    """None for a single number."""
    return (shape[0], 0) if len(shape) and type(shape[0]) is int else None


def _of_packed(fields: Any, found: tuple[int, int] | None) -> tuple[int, int] | None:
    """A row of packed sequences is as many samples as it has; 0 where only their values say."""
    for name in BOUNDARIES:
        shape = getattr(fields.get(name), "shape", None) if found else None
        if found and shape:
            return max(0, shape[0] - 1), found[1]
    if found and found[0] == 1 and POSITIONS in fields:
        return 0, found[1]
    return found


def _of_tokens(ids: Any) -> tuple[int, int] | None:
    shape = getattr(ids, "shape", None)
    if shape is None:
        return _measure(ids, MAX_DEPTH - 1)
    tokens = 1
    for length in shape:
        if type(length) is not int:
            return _of_shape(shape)
        tokens *= length
    return (shape[0], tokens) if len(shape) else None
