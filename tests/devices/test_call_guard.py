"""Calls that do not return cost their thread and nothing else."""

import threading

import pytest

from tests.waiting import DEADLINE_S
from warpwatch_runtime.supervisor import run_all


def test_what_never_returns_holds_up_no_other_work_and_not_for_longer_than_is_waited() -> None:
    names: list[str] = []
    returns, all_noted = threading.Event(), threading.Event()

    def note() -> None:
        names.append(threading.current_thread().name)
        if len(names) == 2:
            all_noted.set()

    run_all({"hung": returns.wait, "a": note, "b": note}, 0.0)
    assert all_noted.wait(DEADLINE_S)
    assert sorted(names) == ["ww-a", "ww-b"]
    returns.set()
    run_all({"c": note})
    assert names[-1] == "ww-c"
    with pytest.raises(ValueError, match="65 threads, at most 64"):
        run_all({str(number): note for number in range(65)})
