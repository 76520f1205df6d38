"""Parts of odd traces, and the invariants of every verdict on them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.diagnosis.traces import LOADER, ORIGIN_US
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.report.html import render_html
from warpwatch_diagnosis.report.text import render_text
from warpwatch_diagnosis.trace.files import TraceError

NAMES = [
    "ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#x", LOADER, "aten::mm", "aten::item", "gemm",
    "aten::convolution", "aten::convolution_backward", "ncclDevKernel_AllReduce", "[memory]",
    "Memcpy HtoD (Pageable -> Device)", "cudaLaunchKernel", "cudaStreamSynchronize", "cudaMalloc",
    "gloo:all_reduce", "Python GC", "train.py(3): step", "Torch-Compiled Region: 0/1", "torch.save",
]  # fmt: skip
CATEGORIES = [
    "cpu_op", "Operator", "user_annotation", "cuda_runtime", "Runtime", "kernel", "Kernel",
    "gpu_memcpy", "gpu_memset", "cuda_sync", "python_function", "cpu_instant_event", "ac2g", None,
]  # fmt: skip
ARGUMENTS = [
    "correlation", "stream", "device", "bytes", "Bytes", "Total Allocated", "Device Type",
    "Input Dims", "Input type", "Call stack", "grid", "block", "blocks per SM", "Seq",
    "Collective name", "In msg nelems", "Group size", "dtype", "graph id",
]  # fmt: skip
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, False, -1, 0, 1, 10**30, 2**63, 10**400, -(10**400), -1e300, 1e300, 1.7e308,
        float("nan"), float("inf"), 1e-320,
        "", "x", "12", "NaN", [], [[]], [None], [1, "2", {}], {}, {"a": {"b": []}}, [[2**62] * 2],
        [[0, 2**49], [2**49, 0]], [[0, *[2**49] * 40]] * 3, [[10**400]],
    ]
)  # fmt: skip
ANY_JSON = st.recursive(
    ODD | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ARGUMENT_VALUES = st.dictionaries(
    st.sampled_from(ARGUMENTS),
    ODD | st.integers(0, 3) | st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4),
    max_size=4,
)
# Far from 0, where a time means a lost clock, and mostly close together.
TIMES = st.integers(0, 200).map(lambda us: ORIGIN_US + us) | st.sampled_from([1, 0.5, 1e17]) | ODD
ELEMENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "i", "B"]), "ts": TIMES},
    optional={
        "cat": st.sampled_from(CATEGORIES) | ODD,
        "name": st.sampled_from(NAMES) | ODD,
        "dur": st.integers(0, 100) | ODD,
        "pid": st.integers(0, 2) | ODD,
        "tid": st.integers(0, 2) | ODD,
        "args": ARGUMENT_VALUES | ODD,
    },
)


def verdict(path: Path) -> str | None:
    """Return all output that a user can get, or None if the file is refused in one line."""
    try:
        diagnosis = diagnose([path])
    except TraceError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return None
    document = diagnosis.to_json()
    json.dumps(document, allow_nan=False)
    shares = [*ratios(document), *(finding["share"] for finding in document["findings"])]
    assert all(0 <= share <= 1 for share in shares)
    render_text(diagnosis)
    render_html(diagnosis)
    return diagnosis.verdict


def ratios(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.endswith("_ratio") and isinstance(inner, int | float):
                yield inner
            yield from ratios(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from ratios(inner)
