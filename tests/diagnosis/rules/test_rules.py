"""Each rule on traces with a known cause, and one finding for one fault."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.captures import Part, diagnosed, event, kernel, loading, operator, stepped
from tests.diagnosis.traces import ORIGIN_US, STEP_US, TraceFile, cpu_rank
from warpwatch_diagnosis import rules
from warpwatch_diagnosis.diagnosis import diagnose

WORKERS = "MultiProcessing"
COMPILING = "entire_frame_compile (dynamo_timed)"
OPTIMIZER_STEP = event("user_annotation", "Optimizer.step#Adam.step", 0, 1000)
COPY = "Memcpy HtoD (Pageable -> Device)"


def test_the_registry_lists_every_rule_in_order():
    texts = (path.read_text() for path in Path(rules.__file__).parent.glob("*.py"))
    kinds = [kind for text in texts for kind in re.findall(r'^    kind = "(\w+)"$', text, re.M)]
    assert [rule.kind for rule in rules.RULES] == sorted(kinds)


def kernels(count: int, us: float, launch_us: float = 5, late: bool = True) -> list[Part]:
    starts = [k * (STEP_US / count) for k in range(count)]
    return [
        kernel(at, us, at - launch_us - 1 if late else -50, launch_us=launch_us) for at in starts
    ]


def waits(wait_us: float, restart_us: float) -> list[Part]:
    """The host reads a value five times: the device is idle until the next launch."""
    parts = []
    for at in range(0, STEP_US, STEP_US // 5):
        until = at + 2000 - restart_us
        parts += [
            kernel(at, 2000 - restart_us, at - 10),
            event("cpu_op", "aten::item", until - wait_us, wait_us + 1),
            event("cuda_runtime", "cudaStreamSynchronize", until - wait_us, wait_us),
        ]
    return parts


def classes(moving_us: float) -> list[Part]:
    """A busy device: products, and pointwise kernels for ``moving_us``."""
    return [
        kernel(0, STEP_US - moving_us, -50, "sm80_xmma_gemm"),
        kernel(STEP_US - moving_us, moving_us, -40, "vectorized_elementwise_kernel"),
    ]


def reads(count: int, pace_us: int) -> list[Part]:
    return [
        part
        for at in range(0, count * pace_us, pace_us)
        for part in (
            operator(at, 2, "aten::item"),
            operator(at + 0.5, 1, "aten::_local_scalar_dense"),
        )
    ]


def compiled(frames: int, between_us: int) -> list[Part]:
    """Twenty regions of that many functions, with Python between them."""
    size, parts = STEP_US // 20, []
    for k in range(20):
        parts += [
            operator(k * size, size, f"Torch-Compiled Region: {k % frames}/0"),
            operator(k * size, between_us, "TorchDynamo Cache Lookup"),
            operator(k * size + between_us, size - between_us),
        ]
    return parts


def filled(free_us: int, *parts: Part) -> list[Part]:
    """Parts in a step whose operators leave its first ``free_us`` free."""
    return [*parts, operator(free_us, STEP_US - free_us)]


# Parts of each step; then kind, share of the step and confidence of the only finding.
FAULTS: dict[str, tuple[list[Part], str, float, str]] = {
    "idle time under the loader is data loading": (
        [loading(4000), kernel(4100, 5900, 4050)],
        "data_loading", 0.4, "high",
    ),
    "waiting for workers is data loading": (
        filled(800, loading(800, kind=WORKERS)), "data_loading", 0.08, "medium",
    ),
    "long kernels with late launches are host bound": (
        kernels(50, 100), "host_bound", 0.5, "high",
    ),
    "short kernels with longer launches are launch bound": (
        kernels(500, 4, launch_us=12), "launch_bound", 0.8, "high",
    ),
    "collectives that run alone are communication bound": (
        [kernel(0, 7000, -50), kernel(6000, 4000, -50, "ncclDevKernel_AllReduce")],
        "communication_bound", 0.3, "high",
    ),
    "copies from the host that nothing hides are transfer bound": (
        [kernel(0, 8000, -50), event("gpu_memcpy", COPY, 8000, 2000, 7, bytes=8_000_000)],
        "transfer_bound", 0.2, "low",
    ),
    # Its own event is not in the trace, nor that it is pageable.
    "a copy that keeps the host while the GPU is idle is transfer bound": (
        [
            operator(0, 7100, "aten::copy_"),
            event("cuda_runtime", "cudaMemcpyAsync", 10, 7000),
            kernel(7200, 2800, 7150),
        ],
        "transfer_bound", 0.7, "high",
    ),
    "idle time after reading values is sync bound": (
        waits(wait_us=1500, restart_us=400), "sync_bound", 0.2, "high",
    ),
    "a loop that reads values is sync bound": (
        filled(2000, *reads(200, 10)), "sync_bound", 0.199, "medium",
    ),
    "a device that moves memory is memory bound": (
        classes(7500), "memory_bound", 0.75, "high",
    ),
    "memory from the driver in every step is allocator thrash": (
        [event("cuda_runtime", "cudaMalloc", 10, 2000), kernel(2020, 7980, 2015)],
        "allocator_thrash", 0.2, "high",
    ),
    "a gap after state_dict is a checkpoint": (
        filled(3000, *(operator(5 * k, 5, "aten::detach") for k in range(10))),
        "checkpoint", 0.295, "medium",
    ),
    "a checkpoint that fills the window is one": (
        [event("user_annotation", "save_checkpoint", 0, STEP_US), operator(0, STEP_US)],
        "checkpoint", 1.0, "high",
    ),
    "the collector at work is a GC pause": (
        filled(500, event("python_function", "Python GC", 0, 500)), "gc_pause", 0.05, "medium",
    ),
    "a collection while the loader runs is not the loader's": (
        filled(2000, loading(2000), event("python_function", "Python GC", 500, 1500)),
        "gc_pause", 0.15, "high",
    ),
    "compiling in every step is recompilation": (
        filled(2000, operator(0, 2000, COMPILING)), "recompilation", 0.2, "high",
    ),
    "Python between pieces of compiled code is graph breaks": (
        compiled(frames=4, between_us=100), "recompilation", 0.2, "medium",
    ),
    "very many tiny operators are host bound on the CPU": (
        [operator(5 * k, 4, "aten::add") for k in range(2000)], "host_bound", 1.0, "high",
    ),
    # The training thread waits for what a thread of the loader does.
    "a prefetcher's loading that the training waits for is data loading": (
        [loading(4000, tid=99), operator(4000, STEP_US - 4000)], "data_loading", 0.4, "high",
    ),
    "a prefetcher's loading that nothing waits for is not": (
        [loading(4000, at=3000, tid=99), operator(4000, STEP_US - 4000)],
        "host_bound", 0.4, "high",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "kind", "share", "confidence"), FAULTS.values(), ids=FAULTS)
def test_the_fault_is_the_only_finding(tmp_path, parts, kind, share, confidence, golden_text):
    found = diagnosed(tmp_path, stepped(*parts))
    golden_text(found)
    (finding,) = found.findings
    assert (found.verdict, finding.kind, finding.confidence) == (kind, kind, confidence)
    assert finding.share == pytest.approx(share, abs=0.001)


OPERATORS = "operators run for 100 % of the step and nothing stands out"
HEALTHY: dict[str, list[Part]] = {
    "a busy GPU": kernels(50, 200),
    "loading that the GPU does not wait for": [loading(4000), *kernels(50, 200)],
    "loading by the process itself for a short time": filled(800, loading(800)),
    "copies that compute hides": [event("gpu_memcpy", COPY, 0, 5000, 21), *kernels(50, 200)],
    "long waits for a busy device": waits(wait_us=1500, restart_us=20),
    "a busy device that multiplies": classes(4000),
    "a few values a step": filled(1000, *reads(9, 100)),
    "an optimizer that reads its step counters": filled(1000, *reads(100, 10), OPTIMIZER_STEP),
    "layers that are compiled one by one": compiled(frames=1, between_us=50),
}


@pytest.mark.parametrize("parts", HEALTHY.values(), ids=HEALTHY)
def test_what_does_not_delay_the_step_is_healthy(tmp_path, parts, golden_text):
    found = diagnosed(tmp_path, stepped(*parts))
    golden_text(found)
    assert (found.verdict, found.findings) == ("healthy", ())


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (kernel(0, STEP_US, -50), "the GPU is busy for 100 % of the step and nothing stands out"),
        # Compiled code without events of its own counts as operators.
        (operator(0, STEP_US, "Torch-Compiled Region: 0/0"), OPERATORS),
        (operator(0, 9500), OPERATORS.replace("100", "95")),
    ],
)
def test_a_healthy_step_is_described_by_its_contents(tmp_path, part, said):
    assert diagnosed(tmp_path, stepped(part)).summary == said


def test_idle_that_no_late_launch_explains_is_inconclusive(tmp_path):
    found = diagnosed(tmp_path, stepped(*kernels(50, 100, late=False)))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    assert "idle for 50 % of the step for no visible reason" in found.summary


def test_memory_from_the_driver_once_is_growth_and_no_thrash(tmp_path):
    trace = stepped(kernel(2020, 7980, 2015), steps=1)
    trace.event("cuda_runtime", "cudaMalloc", 10, 2000, 77)
    for begin in range(STEP_US, 4 * STEP_US, STEP_US):
        trace.annotation(f"ProfilerStep#{begin}", begin, STEP_US)
        trace.kernel(begin + 20, 9980, begin + 15)
    assert diagnosed(tmp_path, trace).findings == ()


def test_an_annotated_checkpoint_of_one_step_is_one(tmp_path):
    trace = stepped(*filled(3000))
    trace.annotation("checkpoint", 0, 3000)
    finding = diagnosed(tmp_path, trace).findings[-1]
    assert finding.kind == "checkpoint"
    assert finding.share == pytest.approx(0.075)


def test_a_collection_that_the_capture_noted_is_a_gc_pause(tmp_path):
    base_us = 5_000_000
    noted = [[ORIGIN_US + base_us + 100, 300], [ORIGIN_US + base_us - 9_000_000, 1], ["x"], None]
    head: dict[str, Any] = {"gc_pauses_us": noted}
    trace = stepped(*filled(500), warpwatch=head, baseTimeNanoseconds=base_us * 1000)
    trace.operator(0, 50)
    found = diagnosed(tmp_path, trace)
    assert (found.measures[0].host.gc.total_us, found.verdict) == (300, "healthy")
    noted.append([ORIGIN_US + base_us + STEP_US, 450])
    assert diagnosed(tmp_path, trace).verdict == "gc_pause"


def test_compiling_once_may_be_the_start(tmp_path):
    trace = stepped(operator(4000, STEP_US - 4000))
    trace.operator(0, 4000, name=COMPILING)
    for begin in list(trace.each_step())[1:]:
        trace.operator(begin, 4000)
    (finding,) = diagnosed(tmp_path, trace).findings
    assert (finding.kind, finding.confidence) == ("recompilation", "medium")
    assert finding.advice.startswith("If these were the first steps")


def test_graph_breaks_are_reported_without_steps(tmp_path):
    trace = TraceFile(steps=0)
    for k in range(200):
        trace.operator(500 * k, 500, name=f"Torch-Compiled Region: {k % 4}/0")
        trace.operator(500 * k, 100, name="TorchDynamo Cache Lookup")
        trace.operator(500 * k + 100, 400)
    found = diagnosed(tmp_path, trace)
    assert found.verdict == "recompilation"
    assert "the trace calls 200 compiled regions of 4 functions" in found.findings[0].evidence[1]


def test_findings_come_with_the_most_time_to_win_back_first(tmp_path):
    trace = stepped(
        loading(1500),
        kernel(1550, 4000, 1520),
        kernel(5550, 4000, 1530, "ncclDevKernel_AllReduce"),
        event("cuda_runtime", "cudaDeviceSynchronize", 1540, 8020),
    )
    found = diagnosed(tmp_path, trace)
    assert [f.kind for f in found.findings] == ["communication_bound", "data_loading"]


@pytest.mark.parametrize(
    ("ranks", "kind", "rank", "share", "said"),
    [
        pytest.param(
            [{"loading_us": 6000}, {"loading_us": 7000}], "data_loading", 1, 0.7,
            "the same on other ranks: rank 0 60 %", id="all wait for samples",
        ),
        pytest.param(
            [{"host_us": 3000}, {"host_us": 3000}], "host_bound", 0, 0.3,
            "the same on other ranks: rank 1 30 %", id="all run Python between operators",
        ),
        pytest.param(
            [{"waiting_us": 8000}, {"host_us": 8000}], "straggler", 1, 0.8,
            "the difference is Python between the operators", id="one alone runs Python",
        ),
        pytest.param(
            [{"waiting_us": 8000}, {"loading_us": 8000}], "data_loading", 1, 0.8,
            "keeps the others waiting", id="one alone loads",
        ),
        pytest.param(
            [{"waiting_us": 5000}, {"waiting_us": 5500}], "communication_bound", 0, 0.5,
            "", id="all wait for each other",
        ),
        # Shared cores: 1.6 times the others' time in every step.
        pytest.param(
            [{"waiting_us": 3750}, {}], "straggler", 1, 0.375,
            "takes 10.0 ms, theirs 6.2 ms", id="one alone has slower operators",
        ),
    ],
)  # fmt: skip
def test_of_ranks_on_the_cpu_the_fault_is_one_finding_of_the_worst(
    tmp_path, ranks, kind, rank, share, said, golden_text
):
    found = diagnosed(tmp_path, *(cpu_rank(k, **times) for k, times in enumerate(ranks)))
    golden_text(found)
    (finding,) = found.findings
    assert (finding.kind, finding.rank) == (kind, rank)
    assert finding.share == pytest.approx(share, abs=0.001)
    assert said in " ".join(finding.evidence)


def test_one_step_is_enough_for_a_verdict_that_is_less_sure(tmp_path):
    found = {steps: diagnosed(tmp_path, cpu_rank(0, host_us=4000, steps=steps)) for steps in (1, 5)}
    assert {n: f.verdict for n, f in found.items()} == {1: "host_bound", 5: "host_bound"}
    assert {n: f.findings[0].confidence for n, f in found.items()} == {1: "medium", 5: "high"}
    assert found[1].findings[0].evidence[-1] == "only 1 step was recorded"


def test_what_was_so_in_the_baseline_comes_after_what_is_new(tmp_path):
    before = cpu_rank(0, host_us=4000).write(tmp_path / "before.json")
    now = cpu_rank(0, host_us=4100, loading_us=2500).write(tmp_path / "now.json")
    assert diagnose([now]).verdict == "host_bound"
    new, old = diagnose([now], baseline=[before]).findings
    assert (new.kind, new.confidence) == ("data_loading", "high")
    assert (old.kind, old.confidence) == ("host_bound", "low")
    assert new.evidence[-1] == "the baseline has 0.0 %"
    assert old.evidence[-1] == "it was so before: the baseline has 40 %"
    assert old.recoverable_s == pytest.approx(0.0004)
