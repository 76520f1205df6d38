"""Captures of a real training: options, interruptions, errors, other profilers, memory, Nsight."""

import ast
import itertools
import json
import os
import pickle
import re
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cases import cases
from tests.client.training import Training, names, training
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S, eventually
from warpwatch.captures import memory
from warpwatch.captures.memory import HostGrowth, Mark, MemoryRecorder
from warpwatch.captures.profilers import _inductor_left_alone, _Pauses
from warpwatch_diagnosis.memory_growth import diagnose_memory
from warpwatch_diagnosis.trace.reader import read_trace

pytestmark = pytest.mark.torch
TABLE = cases(__file__)
LEAKS = TABLE["leaks"]

# How a program profiles itself.
PROFILERS = TABLE["profilers"]


def leaves_nothing(trained: Training, id: str) -> bool:
    return not [name for name in trained.files() if name.startswith(id)]


def test_options_are_recorded_and_only_when_asked_for(trained):
    trained.works("plain")
    plain = trained.captured("plain")
    assert not {"record_shapes", "profile_memory", "with_stack"} & set(plain)
    trained.capture("more", options=["shapes", "stacks", "memory", "nonsense"])
    trained.steps(6)
    more = trained.captured("more")
    assert (more["record_shapes"], more["profile_memory"], more["with_stack"]) == (1, 1, 1)
    shapes = [
        found["args"]["Input Dims"]
        for found in more["traceEvents"]
        if found.get("name") == "aten::addmm"
    ]
    assert shapes == [[[8], [4, 8], [8, 8], [], []]] * 2
    assert "[memory]" in names(more)
    assert any("<string>" in name and "inside" in name for name in names(more))


def test_a_capture_does_not_collect_the_programs_garbage(trained):
    """It would look at every object of the program."""
    trained.steps(1, "import gc; gc.disable(); seen = []; see = lambda *_: seen.append(1)")
    trained.steps(1, "gc.callbacks.append(see)")
    trained.works()
    trained.steps(1, "gc.callbacks.remove(see); gc.enable(); assert not seen")


def test_the_estimate_of_events_is_corrected_by_a_capture(trained):
    def estimate() -> int:
        return int(trained.folder.ring().metadata.get("events_per_step", 0))

    trained.steps(5)
    # The estimate that the trace before gave, or autograd's counter alone.
    assert 10 <= eventually(estimate) <= 1000
    trained.capture("counted", steps=5)
    trained.steps(10)
    held = len(trained.captured("counted")["traceEvents"]) / 5
    eventually(lambda: abs(estimate() - held) <= 0.1 * held)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("with monitor.phase('eval'): pass", "an evaluation began"),
        ("monitor.switch('checkpoint'); monitor.switch('other')", "a checkpoint began"),
    ],
)
def test_evaluation_or_checkpoint_ends_recording(trained, text, reason):
    id = reason.split()[1]
    trained.record(id)
    # In another thread it does not belong to the training.
    other = "t = threading.Thread(target=monitor.switch, args=('eval',)); t.start(); t.join()"
    trained.steps(1, other)
    assert trained.names(id)[-1] == "capture_started"
    trained.steps(1, text)
    assert trained.detail(id) == f"interrupted: {reason}"
    assert leaves_nothing(trained, id)
    # Before the recording it ends nothing, not even in the step before the first.
    start = trained.capture(f"{id}-2")
    trained.steps(1)
    trained.steps(1, text)
    trained.steps(6)
    assert trained.event("capture_finished", f"{id}-2")["first_step"] == start


def test_a_recording_after_the_last_step_ends_at_the_next_phase(trained):
    trained.record("last")
    trained.steps(
        1,
        "monitor.clock.captures.session.limit_s = 0.0\n"
        "def is_stopped():\n"
        "    with monitor.phase('sample'): return not torch.autograd._profiler_enabled()\n"
        "wait(is_stopped)",
    )
    assert trained.detail("last") == "interrupted: the recording took longer than 0 s"
    trained.works("after-last")


@pytest.mark.parametrize(
    "method", ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"]
)
def test_an_error_of_the_profiler_is_the_one_answer(trained, method):
    trained.steps(
        1,
        "from torch.profiler import _KinetoProfile\n"
        f"original = _KinetoProfile.{method}\n"
        "def broken(profiler, path=None):\n"
        "    assert not path or os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700\n"
        f"    _KinetoProfile.{method} = original\n"
        "    raise RuntimeError('broken')\n"
        f"_KinetoProfile.{method} = broken\n",
    )
    id = method.replace("_", "-")
    trained.capture(id)
    trained.steps(6)
    assert trained.detail(id) == "RuntimeError: broken"
    trained.works(f"{id}-2")
    ends = [name for name in trained.names(id) if name != "capture_started"]
    assert ends == ["capture_armed", "capture_failed"]
    eventually(lambda: not [name for name in trained.files() if name.endswith(".tmp")])


@pytest.mark.parametrize("kind", ["torch", "memory"])
def test_a_thread_that_ends_costs_that_trace_alone(folder, with_torch, kind):
    threads = "for _ in range(2):\n  t = threading.Thread(target=serve); t.start(); t.join()"
    with training(folder, with_torch, main=threads) as found:
        found.record(kind=kind)
        found.process.stdin.write("null\n")
        found._read()
        found.steps(1)
        assert found.detail() == "the training thread ended"
        found.steps(1, "import tracemalloc; assert not tracemalloc.is_tracing()")
        found.works()


def test_a_process_group_is_described_by_torch_itself(trained):
    trained.steps(
        1,
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n",
    )
    trained.works("group")
    reported = trained.captured("group")["distributedInfo"]
    trained.steps(1, "dist.destroy_process_group()")
    assert (reported["backend"], reported["rank"], reported["world_size"]) == ("gloo", 0, 1)


def test_a_child_that_is_forked_while_it_records_disturbs_nothing(trained):
    start = trained.capture("forked", steps=20)
    trained.steps(4)
    trained.steps(
        20,
        "warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for _ in range(30):\n"
        "        with monitor.step(): pass\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n",
    )
    assert trained.event("capture_finished", "forked")["last_step"] == start + 19
    assert trained.names("forked") == ["capture_armed", "capture_started", "capture_finished"]


def test_a_rank_that_goes_wrong_answers_and_goes_on(folder, with_torch):
    """While it records its ring is removed, and later it is asked to end."""
    define = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
    with training(folder, with_torch, define, RANK="3", WORLD_SIZE="8") as found:
        # A rank without a process group is reported apart.
        found.works()
        trace = read_trace(found.handed_over("after"))
        assert (trace.rank, trace.world_size, trace.job) == (3, 8, "demo")
        found.handed_over("after").unlink()
        found.record("lost")
        old = folder.ring().name
        os.unlink(folder.path / "ranks" / f"{old}.ring")
        found.steps(1, "while monitor.clock.ring is None or not monitor.clock.ring.links(): pass")
        assert folder.ring().name != old
        found.steps(2)
        eventually(lambda: not found.files())
        found.accept_commands()
        found.works("second")
        found.handed_over("second").unlink()
        found.record("exits")
        found.process.terminate()
        assert found.process.wait() == 3
    failed = {"event": "capture_failed", "id": "exits", "detail": "the process exits"}
    assert folder.ring().events[-2:] == [failed, {"event": "exit"}]
    assert found.files() == []


def test_an_inbox_that_goes_meanwhile_is_one_answer(folder, with_torch):
    with training(folder, with_torch) as found:
        found.capture(steps=30)
        found.steps(5)
        (folder.path / "inbox").rename(folder.path / "elsewhere")
        found.steps(30)
        assert found.detail().startswith("FileNotFoundError")
        assert found.names() == ["capture_armed", "capture_started", "capture_failed"]


# --- the program's own profiler: ours gives way, theirs gets a whole trace ------------------------


@pytest.mark.parametrize("how", PROFILERS)
def test_ours_is_refused_while_theirs_warms_up_or_records(trained, how):
    trained.capture(f"armed-{how}", start=trained.number + 4)
    trained.steps(1)
    trained.steps(4, f"own = {PROFILERS[how]}; own.__enter__()")
    trained.capture(f"refused-{how}")
    trained.steps(1)
    for id in (f"armed-{how}", f"refused-{how}"):
        assert trained.detail(id) == "profiler_busy"
    trained.steps(1, "own.__exit__(None, None, None)")
    trained.works(f"after-{how}")


@pytest.mark.parametrize("how", ["profile", "autograd"])
def test_ours_ends_and_theirs_is_whole(trained, how, tmp_path):
    trained.record(how)
    trained.steps(5, f"own = {PROFILERS[how]}; own.__enter__(); torch.ones(3).cos()")
    assert trained.detail(how) == "the program's own profiler began"
    end = "torch.ones(3).sin(); own.__exit__(None, None, None); own.export_chrome_trace"
    trained.steps(1, f"{end}({str(tmp_path / 'own.json')!r})")
    theirs = json.loads((tmp_path / "own.json").read_text())
    assert {"aten::cos", "aten::addmm", "aten::sin"} <= names(theirs)
    assert trained.names(how) == ["capture_armed", "capture_started", "capture_failed"]
    assert leaves_nothing(trained, how)


def test_a_schedule_that_comes_to_its_warm_up_ends_ours(trained, tmp_path):
    traced = tmp_path / "own.json"
    trained.steps(
        1,
        "own = profile(activities=CPU, schedule=schedule(wait=20, warmup=5, active=3, repeat=1),\n"
        f"    on_trace_ready=lambda own: own.export_chrome_trace({str(traced)!r}))\n"
        "own.start()\n"
        "def inside(number): own.step()\n",
    )
    # While theirs waits for its turn ours is free to record.
    trained.works("waiting")
    trained.capture("warming", steps=100)
    trained.steps(30)
    assert trained.detail("warming") == "the program's own profiler began"
    trained.steps(1, "own.stop()\ndef inside(number): pass")
    assert {f"ProfilerStep#{number}" for number in (25, 26, 27)} <= names(
        json.loads(traced.read_text())
    )


def test_a_profiler_in_another_thread_waits_for_ours(trained, tmp_path):
    traced = tmp_path / "own.json"
    trained.record("beside")
    trained.steps(
        1,
        "def beside():\n"
        "    with profile(activities=CPU) as own: torch.ones(3).tan()\n"
        f"    own.export_chrome_trace({str(traced)!r})\n"
        "thread = threading.Thread(target=beside)\n"
        "thread.start()\n"
        "wait(lambda: monitor.clock.captures.session.dropped)\n"
        "assert thread.is_alive()\n",
    )
    trained.steps(1, "thread.join()")
    assert trained.detail("beside") == "the program's own profiler began"
    assert "aten::tan" in traced.read_text()
    trained.works("after-thread")


# The parts of torch.cuda.memory._snapshot() on a GPU that are read.
SNAPSHOT: Any = json.loads(Path(__file__).with_name("memory_snapshot.json").read_bytes())
STAND_IN = f"import json\nSNAPSHOT = {json.dumps(SNAPSHOT)!r}\n{TABLE['allocator']}"
NO_EVENTS = {"WARPWATCH_CUDA_EVENTS": "0"}


def test_a_snapshot_that_cannot_be_written_leaves_no_file(tmp_path):
    recorder = MemoryRecorder(SimpleNamespace(_snapshot=lambda: {"a function": lambda: 0}), 2)
    recorder.stop({})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        recorder.deliver(str(tmp_path / "c-1"), Mock())
    assert list(tmp_path.iterdir()) == []
    # One step alone shows no growth.
    assert recorder._host.report(Mock()) is None


def test_allocations_are_traced_for_30_s_at_most():
    clock, traced = ManualClock(), []
    growth = HostGrowth(9, clock.monotonic)
    growth.start()
    for passed_s in (30.0, 0.1):
        clock.advance(passed_s)
        growth.step_ended()
        traced.append(tracemalloc.is_tracing())
    assert traced == [True, False]
    # The helper's heart beats once for each mark, however few allocations it has.
    growth.report(lambda: traced.append(False))
    assert traced == [True, *[False] * 3]


def test_a_program_that_traces_itself_goes_on_and_so_does_one_that_was_interrupted():
    tracemalloc.start(3)
    for growth in (HostGrowth(9), HostGrowth(9)):
        growth.start()
        growth.stop()
    assert tracemalloc.get_traceback_limit() == 3 and tracemalloc.is_tracing()
    tracemalloc.stop()
    growth, before = HostGrowth(9), HostGrowth(9)
    growth.drop()
    growth.start()
    assert not tracemalloc.is_tracing()
    before.start()
    before.drop()
    # The program's own, of which neither it nor a child knows.
    tracemalloc.start()
    before.drop()
    memory._in_child()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


def test_the_memory_of_the_marks_is_none_of_the_programs(monkeypatch):
    def grown(*used: int | None) -> Any:
        growth, read = HostGrowth(3, lambda: 0.0), iter(used)
        monkeypatch.setattr(memory, "_anonymous_bytes", lambda: next(read))
        for _ in range(3):
            growth.step_ended()
        report = growth.report(Mock()) or {}
        return report["steps"], report["bytes_per_step"]

    # Before and after each mark.
    assert grown(1000, 1100, 2100, 2150, 3200, 3300) == (2, (3200 - 150 - 1000) / 2)
    assert grown(1000, None, 2100, 2150, 3200, 3300) == (2, None)


def test_a_line_that_a_type_knows_is_not_guessed_by_the_size_of_its_blocks():
    def trace(file: str) -> Any:
        return SimpleNamespace(traceback=[SimpleNamespace(filename=file, lineno=1)], size=80)

    growth, few, many = HostGrowth(9), trace("/job/few.py"), trace("/job/many.py")
    own = trace(f"{memory._OWN}steps.py")
    growth._marks = [Mark(n, 0, Counter(), [few, own] * n + [many] * (9 * n)) for n in (1, 2, 3)]
    lines = (("job.A", "/job/few.py:1"), ("job.B", None), ("dict", None))
    growth._types = [{"type": kind, "line": line, "sizes": [80]} for kind, line in lines]
    found = growth._lines(lambda: None)
    assert [[*line.values()] for line in found] == [["/job/many.py:1", 720], ["/job/few.py:1", 80]]
    # A type of Python's own without a line is one of the marks themselves.
    assert [one["line"] for one in growth._types] == ["/job/few.py:1", "/job/many.py:1"]


def test_the_compiler_is_not_imported_for_a_profiler(monkeypatch):
    lazy = {"_inductor", "_dynamo"}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_lazy_modules=lazy))
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    with pytest.raises(ZeroDivisionError), _inductor_left_alone():
        assert lazy == {"_dynamo"}
        raise ZeroDivisionError
    assert lazy == {"_inductor", "_dynamo"}
    monkeypatch.setitem(sys.modules, "torch._inductor", SimpleNamespace())
    with _inductor_left_alone():
        assert "_inductor" in lazy


def test_pauses_of_the_collector_are_kept_up_to_a_number():
    pauses, now_ns = _Pauses(), itertools.count(1_000_000, 4000)
    pauses.leave()
    pauses._time_ns = lambda: next(now_ns)
    pauses._collected("stop", {})
    for _ in range(1001):
        pauses._collected("start", {})
        pauses._collected("stop", {})
    assert (pauses.found_us[0], len(pauses.found_us)) == ((1004.0, 4.0), 1000)


LEAKY = """
import numpy, torch
kept, total = [], torch.zeros(())
class Sample:
    def __init__(self, size):
        self.values = [float(n) for n in range(size)]
"""


@pytest.mark.parametrize(("leak", "verdict", "says", "advises"), LEAKS.values(), ids=LEAKS)
def test_what_leaks_in_a_process_without_a_gpu_is_named_with_its_line(
    folder, with_torch, tmp_path, leak, verdict, says, advises
):
    (tmp_path / "leaky.py").write_text(f"{LEAKY}def inside(number):\n    global total; {leak}\n")
    define = f"sys.path.insert(0, {str(tmp_path)!r})\nfrom leaky import inside\n"
    with training(folder, with_torch, define) as found:
        start = found.capture(steps=20, kind="memory")
        found.steps(25)
        finished = found.event("capture_finished")
        assert (finished["first_step"], finished["last_step"]) == (start, start + 19)
        file = f"c-1.{folder.ring().name}.{finished['more']}.memory.json"
        assert found.files() == [file]
        diagnosis = diagnose_memory([folder.path / "inbox" / file])
        # Nothing of it is left in the program, and another profiler may use what it used.
        found.steps(1, "import tracemalloc; assert not tracemalloc.is_tracing()")
    assert diagnosis["verdict"] == verdict, diagnosis
    assert re.search(says, diagnosis["summary"])
    assert re.search(advises, diagnosis["findings"][0]["advice"])


def test_neither_a_child_nor_the_rest_of_a_step_after_a_cancel_is_traced(folder, with_torch):
    with training(folder, with_torch) as found:
        found.record(kind="memory")
        fork = "import tracemalloc\nchild = os.fork()\n"
        fork += "if not child: os._exit(tracemalloc.is_tracing())\n"
        found.steps(1, f"{fork}assert tracemalloc.is_tracing() and not os.waitpid(child, 0)[1]")
        found.request(1, "print(0, flush=True); wait(lambda: not tracemalloc.is_tracing())")
        found._read()
        found.cancel("another")
        found.stacks("s-1")
        assert found.names()[-1] == "capture_started"
        found.cancel("c-1")
        found._read()


@pytest.mark.parametrize("count_s", [0, 1])
def test_of_objects_that_take_too_long_to_count_the_lines_are_left(count_s):
    core = itertools.count(100, count_s)
    growth = HostGrowth(9, core=lambda: next(core))
    growth.start()
    kept = []
    for _ in range(9):
        kept.append(bytes(50_000))
        growth.step_ended()
    growth.stop()
    report = growth.report(lambda: None) or {}
    assert (report["types"] is None, next(core)) == (count_s > 0, 100 + 2 * count_s)
    here = (one["bytes_per_step"] for one in report["lines"] if __file__ in one["line"])
    assert next(here) > 49_000


def test_the_allocators_history_becomes_two_files(folder, with_torch):
    with training(folder, with_torch, STAND_IN, **NO_EVENTS) as found:
        start = found.capture(steps=3, kind="memory")
        found.steps(6)
        finished = found.event("capture_finished")
        assert (finished["first_step"], finished["last_step"]) == (start, start + 2)
        base = f"c-1.{folder.ring().name}"
        snapshot = f"{base}.{finished['token']}.memory.pickle"
        summary = f"{base}.{finished['more']}.memory.json"
        assert pickle.loads((folder.path / "inbox" / snapshot).read_bytes()) == SNAPSHOT
        reported = json.loads((folder.path / "inbox" / summary).read_text())
        assert (reported["rank"], reported["job"]) == (0, "demo")
        assert finished["detail"] == f"snapshot {reported['snapshot_s']} s"
        assert reported["snapshot_s"] < DEADLINE_S
        assert reported["lines"][0]["line"] == "/job/model.py:7 forward"
        assert found.files() == sorted([summary, snapshot])
        # One that the program records itself is left alone.
        found.steps(1, "history.append(1); assert StandIn.calls[1:] == [(None, 'all', None)]")
        found.capture("busy", kind="memory")
        found.steps(1)
        assert found.detail("busy") == "memory_busy"


def test_nsight_is_told_the_steps(folder, with_torch, tmp_path):
    under = {"NSYS_PROFILING_SESSION_ID": "1", **NO_EVENTS}
    with training(folder, with_torch, TABLE["nsys"], **under) as found:
        # Two profilers of the GPU are one too many.
        found.capture("t-1")
        found.steps(1)
        assert found.detail("t-1") == "cupti_busy: NSYS_PROFILING_SESSION_ID is set"
        start = found.capture(kind="nsys")
        found.steps(6)
        steps = {"first_step": start, "last_step": start + 1}
        finished = {"event": "capture_finished", "id": "c-1", **steps}
        assert found.event("capture_finished") == finished
        assert found.names() == ["capture_armed", "capture_started", "capture_finished"]
        said = tmp_path / "said"
        found.steps(1, f"with open({str(said)!r}, 'w') as file: file.write(repr(StandIn.said))")
    assert ast.literal_eval(said.read_text()) == [
        ("start",),
        *(("range_push", f"step {start}"), ("range_pop",)),
        *(("range_push", f"step {start + 1}"), ("range_pop",)),
        ("stop",),
    ]
