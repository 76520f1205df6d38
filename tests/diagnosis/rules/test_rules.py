"""Each rule on traces with a known cause, and one finding for one fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.traces import LOADER, STEP_US, TraceFile, cpu_rank
from warpwatch_diagnosis import rules
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis


def diagnosed(tmp_path: Path, *ranks: TraceFile) -> Diagnosis:
    paths = [trace.write(tmp_path / f"rank{k}.json") for k, trace in enumerate(ranks)]
    return diagnose(paths)


def gpu_trace(kernels: int, kernel_us: float, launch_us: float = 5, late: bool = True) -> TraceFile:
    """Four steps of equal kernels, one every tenth of a ms when late, else back to back."""
    trace = TraceFile()
    for begin in trace.each_step():
        for k in range(kernels):
            at = begin + k * (STEP_US / kernels)
            trace.kernel(at, kernel_us, at - launch_us - 1 if late else begin - 50, "k", launch_us)
    return trace


def test_the_registry_lists_every_rule_file_in_order() -> None:
    folder = Path(rules.__file__).parent
    files = sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "base"))
    assert [rule.kind for rule in rules.RULES] == files


def test_a_busy_gpu_is_healthy(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, gpu_trace(50, 200))
    assert (found.verdict, found.findings) == ("healthy", ())
    assert found.summary == "the GPU is busy for 100 % of the step and nothing stands out"


def test_idle_under_the_loader_is_data_loading_and_nothing_else(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.annotation(LOADER, begin, 4000)
        trace.kernel(begin + 4100, 5900, launched_us=begin + 4050)
    found = diagnosed(tmp_path, trace)
    assert [f.kind for f in found.findings] == ["data_loading"]
    finding = found.findings[0]
    assert finding.share == 0.4
    assert finding.recoverable_s == pytest.approx(0.016)
    assert "num_workers=4" in finding.advice
    assert any("GPU stood idle during 16.0 ms" in sentence for sentence in finding.evidence)


def test_loading_that_the_gpu_does_not_wait_for_is_no_finding(tmp_path: Path) -> None:
    trace = gpu_trace(50, 200)
    for begin in trace.each_step():
        trace.annotation(LOADER, begin, 4000)
    assert diagnosed(tmp_path, trace).verdict == "healthy"


def test_long_kernels_with_late_launches_are_host_bound(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, gpu_trace(50, 100))
    assert [f.kind for f in found.findings] == ["host_bound"]
    assert found.findings[0].share == pytest.approx(0.5, abs=0.01)


def test_short_kernels_with_longer_launches_are_launch_bound(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, gpu_trace(500, 4, launch_us=12))
    assert [f.kind for f in found.findings] == ["launch_bound"]
    assert "2,000 kernels are shorter than 10 µs" in found.findings[0].evidence[1]


def test_idle_that_no_late_launch_explains_is_inconclusive(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, gpu_trace(50, 100, late=False))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    assert "idle for 50 % of the step for no visible reason" in found.summary


def test_collective_kernels_that_run_alone_are_communication_bound(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.kernel(begin, 7000, begin - 50)
        trace.kernel(begin + 6000, 4000, begin - 50, name="ncclDevKernel_AllReduce")
    found = diagnosed(tmp_path, trace)
    assert [f.kind for f in found.findings] == ["communication_bound"]
    assert found.findings[0].share == pytest.approx(0.3)


def test_copies_from_the_host_that_nothing_hides_are_transfer_bound(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.kernel(begin, 8000, begin - 50)
        trace.event(
            "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", begin + 8000, 2000, 7, bytes=8_000_000
        )
    found = diagnosed(tmp_path, trace)
    assert [(f.kind, f.share) for f in found.findings] == [("transfer_bound", 0.2)]
    assert found.findings[0].evidence[1] == (
        "HtoD from pageable memory ran 4 times for 8.0 ms, 8.0 ms of it alone: 32.0 MB at 4.0 GB/s"
    )
    assert "pin_memory=True" in found.findings[0].advice


def test_copies_that_compute_hides_are_no_finding(tmp_path: Path) -> None:
    trace = gpu_trace(50, 200)
    for begin in trace.each_step():
        trace.event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", begin, 5000, 21)
    assert diagnosed(tmp_path, trace).verdict == "healthy"


def reading_trace(wait_us: float, restart_us: float) -> TraceFile:
    """Five times a step the host reads a value: the device is idle until the next launch."""
    trace = TraceFile()
    for begin in trace.each_step():
        for k in range(5):
            at = begin + k * (STEP_US / 5)
            trace.kernel(at, 2000 - restart_us, at - 10, name="gemm")
            until = at + 2000 - restart_us
            trace.event("cpu_op", "aten::item", until - wait_us, wait_us + 1, 77)
            trace.event("cuda_runtime", "cudaStreamSynchronize", until - wait_us, wait_us, 77)
    return trace


def test_idle_time_after_reading_values_is_sync_bound(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, reading_trace(wait_us=1500, restart_us=400))
    assert [f.kind for f in found.findings] == ["sync_bound"]
    finding = found.findings[0]
    assert finding.share == pytest.approx(0.2, abs=0.01)
    assert "cudaStreamSynchronize under aten::item waited 20 times" in finding.evidence[1]


def test_long_waits_for_a_busy_device_cost_nothing(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, reading_trace(wait_us=1500, restart_us=20)).verdict == "healthy"


def thrashing_trace(steps_with_calls: int) -> TraceFile:
    """cudaMalloc for 2 ms while the device is idle, in some of four steps."""
    trace = TraceFile()
    for index, begin in enumerate(trace.each_step()):
        late = 2000 if index < steps_with_calls else 0
        if late:
            trace.event("cuda_runtime", "cudaMalloc", begin + 10, late, 77)
        trace.kernel(begin + 20 + late, 9980 - late, begin + 15 + late)
    return trace


def test_memory_from_the_driver_in_every_step_is_allocator_thrash(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, thrashing_trace(4))
    assert [f.kind for f in found.findings] == ["allocator_thrash"]
    assert found.findings[0].evidence[1:3] == (
        "cudaMalloc ran 4 times for 8.0 ms, 2.0 ms at most",
        "in 4 of 4 steps",
    )


def test_memory_from_the_driver_once_is_growth_and_no_thrash(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, thrashing_trace(1)).findings == ()


def class_trace(moving_us: float) -> TraceFile:
    """A busy device: products, and pointwise kernels for ``moving_us`` of each 10 ms."""
    trace = TraceFile()
    for begin in trace.each_step():
        trace.kernel(begin, STEP_US - moving_us, begin - 50, name="sm80_xmma_gemm")
        at = begin + STEP_US - moving_us
        trace.kernel(at, moving_us, begin - 40, name="vectorized_elementwise_kernel")
    return trace


def test_a_busy_device_that_moves_memory_is_memory_bound(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, class_trace(7500))
    assert [(f.kind, f.share, f.confidence) for f in found.findings] == [
        ("memory_bound", 0.75, "high")
    ]
    assert found.findings[0].recoverable_s == pytest.approx(0.015)
    assert "torch.compile" in found.findings[0].advice


def test_a_busy_device_that_multiplies_is_healthy(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, class_trace(4000)).verdict == "healthy"


def test_findings_come_with_the_most_time_to_win_back_first(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.annotation(LOADER, begin, 1500)
        trace.kernel(begin + 1550, 4000, begin + 1520)
        trace.kernel(begin + 5550, 4000, begin + 1530, name="ncclDevKernel_AllReduce")
        trace.event("cuda_runtime", "cudaDeviceSynchronize", begin + 1540, 8020, 77)
    found = diagnosed(tmp_path, trace)
    assert [f.kind for f in found.findings] == ["communication_bound", "data_loading"]


def test_cpu_ranks_that_all_wait_for_samples_are_one_finding(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, loading_us=6000), cpu_rank(1, loading_us=7000))
    assert [(f.kind, f.rank, f.share) for f in found.findings] == [("data_loading", 1, 0.7)]
    assert found.findings[0].evidence[-1] == "the same on other ranks: rank 0 60 %"
    assert found.summary == "rank 1: 70 % of the step is spent fetching the next batch"


def test_python_between_operators_is_host_bound_on_the_cpu(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, host_us=3000), cpu_rank(1, host_us=3000))
    assert [(f.kind, f.share) for f in found.findings] == [("host_bound", 0.3)]


def test_very_many_tiny_operators_are_host_bound_on_the_cpu(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        for k in range(2000):
            trace.operator(begin + 5 * k, 4, name="aten::add")
    found = diagnosed(tmp_path, trace)
    assert (found.verdict, len(found.findings)) == ("host_bound", 1)
    assert "8,000 of 8,000 operators are shorter than 10 µs" in found.findings[0].evidence[2]


def test_operators_that_fill_the_step_are_healthy(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, host_us=500), cpu_rank(1, waiting_us=500))
    assert found.verdict == "healthy"
    assert found.summary == "operators run for 95 % of the step and nothing stands out"


def test_waiting_in_gloo_is_not_the_waiting_ranks_own_work(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, waiting_us=8000), cpu_rank(1, host_us=8000))
    assert [(f.kind, f.rank) for f in found.findings] == [("straggler", 1)]
    assert "the difference is Python between the operators" in found.findings[0].evidence[1]


def test_a_rank_that_alone_loads_slowly_is_data_loading_of_that_rank(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, waiting_us=8000), cpu_rank(1, loading_us=8000))
    assert [(f.kind, f.rank) for f in found.findings] == [("data_loading", 1)]


def test_one_rank_alone_that_waits_for_others_is_inconclusive(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, waiting_us=8000))
    assert found.verdict == "inconclusive"
    assert found.summary == (
        "rank 0: 80 % of the step waits in collectives; the other ranks' traces say why; "
        "likeliest: communication_bound (80 %) or straggler (80 %); the traces of all "
        "ranks of the same steps say who waits for whom"
    )


def test_ranks_that_all_wait_long_are_communication_bound(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, cpu_rank(0, waiting_us=5000), cpu_rank(1, waiting_us=5500))
    assert [(f.kind, f.rank, f.share) for f in found.findings] == [("communication_bound", 0, 0.5)]


def test_one_step_is_enough_for_a_verdict_that_is_less_sure(tmp_path: Path) -> None:
    found = {steps: diagnosed(tmp_path, cpu_rank(0, host_us=4000, steps=steps)) for steps in (1, 5)}
    assert {n: f.verdict for n, f in found.items()} == {1: "host_bound", 5: "host_bound"}
    assert {n: f.findings[0].confidence for n, f in found.items()} == {1: "medium", 5: "high"}
    assert found[1].findings[0].evidence[-1] == "only 1 step was recorded"


def test_what_was_so_in_the_baseline_comes_after_what_is_new(tmp_path: Path) -> None:
    before = cpu_rank(0, host_us=4000).write(tmp_path / "before.json")
    now = cpu_rank(0, host_us=4100, loading_us=2500).write(tmp_path / "now.json")
    assert diagnose([now]).verdict == "host_bound"
    found = diagnose([now], baseline=[before])
    assert [(f.kind, f.confidence) for f in found.findings] == [
        ("data_loading", "high"),
        ("host_bound", "low"),
    ]
    assert found.findings[0].evidence[-1] == "the baseline has 0.0 %"
    assert found.findings[1].evidence[-1] == "it was so before: the baseline has 40 %"
    assert found.findings[1].recoverable_s == pytest.approx(0.0004)
