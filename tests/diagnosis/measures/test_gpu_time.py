"""Kernels, copies, streams and launches of one device and of several."""

from pathlib import Path

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.copies import copy_kind
from warpwatch_diagnosis.measures.intervals import total
from warpwatch_diagnosis.measures.kernels import classify
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.verdict.conclusion import conclude

GEMM = {"Input Dims": [[8192, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
H100 = "NVIDIA H100 80GB HBM3"
PINNED = "Memcpy HtoD (Pinned -> Device)"
# From traces of many versions and devices: class and name.
CLASSES = Path(__file__).parents[1] / "fixtures" / "kernel_classes.tsv"
SGEMM = "ampere_sgemm_128x64_nn"


def test_the_class_of_a_kernel_follows_from_its_name() -> None:
    names = [line.split("\t") for line in CLASSES.read_text().splitlines()]
    found = [[classify(name), name] for _, name in names]
    assert len(found) > 40
    assert found == names


def test_kernels_are_summed_by_name_and_by_class_and_overlap_counts_once_as_busy() -> None:
    timeline = Timeline()
    timeline.kernel(0, 100, -10, SGEMM)
    timeline.kernel(50, 100, -5, SGEMM, stream="0/20")
    timeline.kernel(200, 300, -5, "ampere_hgemm_64x64_nn")
    timeline.kernel(600, 8, -5, "triton_poi_fused_add_0")
    gpu = timeline.gpu()
    assert [(k.name, k.count, k.total_us) for k in gpu.kernel_times] == [
        ("ampere_hgemm_64x64_nn", 1, 300),
        (SGEMM, 2, 200),
        ("triton_poi_fused_add_0", 1, 8),
    ]
    gemm, fused = gpu.class_times
    assert (gemm.kernel_class, gemm.count, gemm.total_us, gemm.busy_us) == ("gemm", 3, 500, 450)
    assert (fused.kernel_class, fused.short_count, gemm.short_count) == ("triton_fused", 1, 0)
    assert [(s.name, s.count, s.busy_us) for s in gpu.streams] == [
        ("0/7", 3, 408),
        ("0/20", 1, 100),
    ]


def test_occupancy_and_blocks_are_weighted_by_duration_and_absent_where_unknown() -> None:
    timeline = Timeline()
    thin = {"blocks per SM": 0.5, "est. achieved occupancy %": 10}
    full = {"blocks per SM": 8.5, "est. achieved occupancy %": 90}
    timeline.kernel(0, 100, -10, SGEMM, arguments=thin)
    timeline.kernel(200, 300, -10, SGEMM, arguments=full)
    timeline.kernel(600, 300, -10, "unknown", arguments={"blocks per SM": "broken"})
    gemm, other = sorted(timeline.gpu().class_times, key=lambda c: c.kernel_class)
    assert (gemm.blocks_per_sm, gemm.occupancy_ratio, gemm.underfilled_us) == (6.5, 0.7, 100)
    assert (other.blocks_per_sm, other.occupancy_ratio, other.underfilled_us) == (None, None, 0)


def test_a_kernel_that_began_before_the_window_counts_from_its_begin() -> None:
    timeline = Timeline()
    timeline.kernel(-500, 700, -600, "gemm")
    assert timeline.gpu().kernel_times[0].total_us == 200


def test_collectives_carry_what_ranks_are_compared_by() -> None:
    timeline = Timeline()
    arguments = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000,
        "dtype": "BFloat16", "Group size": 8, "Process Group Name": "0", "Seq": 7,
    }  # fmt: skip
    timeline.kernel(100, 300, 50, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", arguments=arguments)
    unknown = "ncclKernel_Broadcast_RING_LL_Sum_int8_t"
    timeline.kernel(500, 100, None, unknown)
    first, second = timeline.gpu().collectives
    assert (first.name, first.process_group, first.sequence) == ("allreduce", "0", 7)
    assert (first.bytes, first.group_size) == (2000, 8)
    assert first.launched_us is not None
    assert first.begin_us - first.launched_us == 50
    assert (second.name, second.bytes, second.launched_us) == (unknown, None, None)


def test_a_copys_name_has_direction_and_memory() -> None:
    kinds = {
        "Memcpy HtoD (Pageable -> Device)": ("HtoD", "pageable"),
        PINNED: ("HtoD", "pinned"),
        "Memcpy DtoH (Device -> Pageable)": ("DtoH", "pageable"),
        "Memcpy DtoD (Device -> Device)": ("DtoD", None),
        "Memcpy PtoP (Device -> Device)": ("PtoP", None),
        "Memcpy HtoD (Host -> Device)": ("HtoD", None),
        "CopyDeviceToHost": ("DtoH", None),
        "Memset (Device)": ("memset", None),
        "something": ("unknown", None),
    }
    assert {name: copy_kind(name) for name in kinds} == kinds


def test_copies_have_bytes_bandwidth_and_the_time_that_no_kernel_hides() -> None:
    timeline = Timeline()
    timeline.kernel(500, 1_000, -10)
    for at_us in (0, 2_000):
        timeline.copy(at_us, 1_000, -20, PINNED, arguments={"bytes": 20_000_000})
    timeline.copy(5_000, 1, -20, arguments={"bytes": 4})
    # Its size is unknown.
    timeline.copy(6_000, 1, -20, "Memcpy HtoD (Host -> Device)")
    pinned, read, unknown = timeline.gpu().copy_times
    assert (pinned.count, pinned.bytes, pinned.total_us) == (2, 40_000_000, 2_000)
    assert (pinned.exposed_us, pinned.bandwidth_gb_per_s, pinned.small_count) == (1_500, 20.0, 0)
    assert (read.direction, read.memory, read.small_count) == ("DtoH", "pageable", 1)
    assert (unknown.bytes, unknown.bandwidth_gb_per_s) == (None, None)


def test_bandwidth_is_that_of_whole_copies_also_where_the_window_cuts_them() -> None:
    timeline = Timeline()
    timeline.copy(9_000, 4_000, 8_990, "CopyHostToDevice", arguments={"bytes": 40_000_000})
    (found,) = timeline.gpu().copy_times
    assert (found.total_us, found.bytes, found.bandwidth_gb_per_s) == (1_000, 40_000_000, 10.0)


def test_calls_delays_and_outliers_are_counted() -> None:
    timeline = Timeline()
    timeline.kernel(100, 2, launched_us=90)
    timeline.kernel(1_000, 500, launched_us=400, call_us=60)
    timeline.kernel(2_000, 500, launched_us=1_890)
    timeline.kernel(3_000, 500, launched_us=None)
    timeline.kernel(4_000, 500, launched_us=3_990, call="cudaGraphLaunch", call_us=20)
    found = timeline.gpu().launches
    assert (found.count, found.without_launch, found.in_graphs) == (4, 1, 1)
    assert (found.total_call_us, found.median_call_us) == (90, 12.5)
    assert (found.slow_calls, found.late_starts, found.short_kernels) == (1, 2, 1)
    assert found.median_delay_us == 55


def test_the_queue_grows_with_each_call_and_shrinks_when_work_begins() -> None:
    timeline = Timeline()
    for index in range(4):
        timeline.kernel(1_000 + 1_000 * index, 1_000, launched_us=100 * index)
    timeline.kernel(9_000, 10, launched_us=8_990, stream="0/20")
    main, side = timeline.gpu().launches.queues
    assert (main.stream, main.launches, main.longest, main.full_us) == ("0/7", 4, 4, 0)
    assert main.mean == (1 * 100 + 2 * 100 + 3 * 100 + 4 * 700 + (3 + 2 + 1) * 1_000) / 10_000
    assert (side.longest, side.launches) == (1, 1)


def test_a_graphs_launch_counts_once_and_its_kernels_neither_queue_nor_are_short() -> None:
    timeline = Timeline()
    timeline.add("runtime", "cudaGraphLaunch", 100, 80, correlation=900)
    for index in range(200):
        timeline.add("kernel", "gemm", 200 + 4 * index, 4, "0/7", 900)
    timeline.kernel(9_000, 500, launched_us=8_900)
    gpu = timeline.gpu()
    found = gpu.launches
    assert (found.count, found.in_graphs, found.without_launch) == (2, 200, 0)
    assert (found.total_call_us, found.median_call_us, found.slow_calls) == (85, 42.5, 1)
    assert (found.median_delay_us, found.late_starts, found.short_kernels) == (57.5, 0, 0)
    (queue,) = found.queues
    assert (queue.launches, queue.longest, queue.full_us) == (1, 1, 0)
    assert gpu.kernels.median_launch_us == 42.5


def two_devices() -> Timeline:
    """Device 0 is busy for 98 % of each step, device 1 for 9 %."""
    timeline = Timeline(steps=4, device=H100)
    for begin in range(0, 40_000, 10_000):
        timeline.kernel(begin + 100, 9_800, launched_us=begin + 10, stream="0/7")
        timeline.kernel(begin + 9_100, 900, launched_us=begin + 9_050, stream="1/7")
    return timeline


def test_an_idle_device_does_not_hide_behind_a_busy_one() -> None:
    measures = two_devices().measured()
    document = trace_json(measures)
    assert document["time"]["gpu_busy_ratio"] == 0.09
    assert sum(document["idle"].values()) == 0.91
    assert document["device"] == "1"
    assert [(d["name"], d["busy_ratio"], d["in_use"]) for d in document["devices"]] == [
        ("0", 0.98, True),
        ("1", 0.09, True),
    ]
    assert [s["name"] for s in document["streams"]] == ["1/7"]
    assert measures.label == "t.json, GPU 1"
    assert conclude([measures]).verdict != "healthy"


def test_what_a_stray_context_leaves_on_a_device_is_not_judged() -> None:
    timeline = Timeline()
    timeline.kernel(0, 9_900, launched_us=-10, stream="3/7")
    timeline.kernel(100, 2, launched_us=-10, stream="0/7")
    gpu = timeline.gpu()
    assert (gpu.device, gpu.devices_in_use, total(gpu.busy)) == ("3", 1, 9_900)
    assert timeline.measured().label == "t.json"


def test_compute_of_another_device_hides_no_communication() -> None:
    timeline = Timeline()
    timeline.kernel(0, 9_000, launched_us=-10, stream="0/7")
    timeline.kernel(1_000, 5_000, launched_us=-10, name="ncclDevKernel_AllReduce", stream="1/20")
    gpu = timeline.gpu()
    assert (total(gpu.exposed_communication), gpu.overlap_ratio) == (5_000, 0.0)


def test_mfu_is_that_of_all_devices_in_use() -> None:
    found: list[tuple[float | None, float | None]] = []
    alone = Timeline(steps=4, device=H100)
    alone.kernel(100, 9_800, launched_us=10)
    for timeline in (two_devices(), alone):
        timeline.add("operator", "aten::mm", 0, 100, arguments=GEMM)
        roofline = timeline.measured().roofline
        found.append((roofline.flops, roofline.mfu_ratio))
    (flops, both), (same_flops, one) = found
    assert flops == same_flops
    assert both is not None and 2 * both == one


def test_the_argument_names_the_device_before_the_process_id_does() -> None:
    timeline = Timeline()
    for at_us, stream in ((0, "5/7"), (200, "6/7")):
        timeline.kernel(at_us, 100, launched_us=-10, stream=stream, arguments={"device": 0})
    assert [(d.name, d.count) for d in timeline.gpu().devices] == [("0", 2)]
