"""A process that has loaded the fake driver: evaluates expressions with pynvml, one a line.

Answers are JSON: ``{"value": …}``, or ``{"error": code}`` where NVML returned an error. ``gpu(i)``
is the handle of index ``i``; names that an expression binds with ``:=`` stay.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import pynvml


def plain(value: Any) -> Any:
    """Structures as dictionaries, arrays as lists, handles as their address."""
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, pynvml.nvmlFriendlyObject):
        return {name: plain(item) for name, item in vars(value).items()}
    if isinstance(value, list | tuple | ctypes.Array):
        return [plain(item) for item in value]
    if isinstance(value, ctypes._Pointer):
        return ctypes.addressof(value.contents) if value else None
    if isinstance(value, bytes):
        return value.decode()
    return value


def gpm_metrics(one: Any, two: Any, *numbers: int) -> Any:
    """The metrics between two samples: (code, value) each."""
    get = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION)
    get.sample1, get.sample2, get.numMetrics = one, two, len(numbers)
    for i, number in enumerate(numbers):
        get.metrics[i].metricId = number
    pynvml.nvmlGpmMetricsGet(get)
    return [(get.metrics[i].nvmlReturn, get.metrics[i].value) for i in range(len(numbers))]


def fields(handle: Any, *ids: Any) -> Any:
    """Field values: (code, value as an unsigned number) each."""
    answers = pynvml.nvmlDeviceGetFieldValues(handle, ids)
    return [(answer.nvmlReturn, answer.value.ullVal) for answer in answers]


def main() -> None:
    names: dict[str, Any] = {name: getattr(pynvml, name) for name in dir(pynvml)}
    names |= {"gpu": pynvml.nvmlDeviceGetHandleByIndex, "fields": fields}
    names |= {"gpm_metrics": gpm_metrics}
    for line in sys.stdin:
        try:
            answer = {"value": plain(eval(line, names))}
        except pynvml.NVMLError as error:
            answer = {"error": error.value}
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
