"""Kernels by class and by name."""

from __future__ import annotations

import pytest

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.kernels import classify
from warpwatch_diagnosis.measures.measures import measure

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("ampere_sgemm_128x64_nn", "gemm"),
        ("volta_sgemm_32x128_tn", "gemm"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x128x32_stage4", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "gemm"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>", "gemm"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "gemm"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1", "gemm"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128>", "gemm"),
        ("void splitKreduce_kernel<float, float, float, float, true, false, false>", "gemm"),
        ("triton_tem_fused_addmm_0", "gemm"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc", "convolution"),
        ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false>", "convolution"),
        ("cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1", "convolution"),
        ("volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", "convolution"),
        ("_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolution", "convolution"),
        ("miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1", "convolution"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 32, 4>>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        (ELEMENTWISE + "CUDAFunctor_add<float>>", "elementwise"),
        (ELEMENTWISE + "FillFunctor<float>>", "elementwise"),
        ("void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(x)>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copy"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", "copy"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>", "normalization"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>", "normalization"),
        ("void at::native::batch_norm_backward_kernel<float>", "normalization"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10>", "softmax"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", "softmax"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>",
         "optimizer"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float>", "indexing"),
        ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel", "indexing"),
        ("void at::native::index_elementwise_kernel<128, 4>", "indexing"),
        ("void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long>>", "indexing"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "communication"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "communication"),
        ("triton_poi_fused_add_relu_0", "triton_fused"),
        ("triton_per_fused_native_layer_norm_3", "triton_fused"),
        ("my_kernel", "other"),
    ],
)  # fmt: skip
def test_the_class_follows_from_the_name(name: str, kernel_class: str) -> None:
    assert classify(name) == kernel_class


def measured(timeline: Timeline) -> GpuTime:
    gpu = measure(timeline.trace).gpu
    assert gpu is not None
    return gpu


def test_kernels_are_summed_by_name_and_by_class_and_overlap_counts_once_as_busy() -> None:
    timeline = Timeline()
    timeline.kernel(0, 100, -10, "ampere_sgemm_128x64_nn")
    timeline.kernel(50, 100, -5, "ampere_sgemm_128x64_nn", stream="0/20")
    timeline.kernel(200, 300, -5, "ampere_hgemm_64x64_nn")
    timeline.kernel(600, 8, -5, "triton_poi_fused_add_0")
    gpu = measured(timeline)
    assert [(k.name, k.count, k.total_us) for k in gpu.kernel_times] == [
        ("ampere_hgemm_64x64_nn", 1, 300),
        ("ampere_sgemm_128x64_nn", 2, 200),
        ("triton_poi_fused_add_0", 1, 8),
    ]
    gemm, fused = gpu.class_times
    assert (gemm.kernel_class, gemm.count, gemm.total_us, gemm.busy_us) == ("gemm", 3, 500, 450)
    assert (fused.kernel_class, fused.short_count, gemm.short_count) == ("triton_fused", 1, 0)


def test_occupancy_and_blocks_are_weighted_by_duration_and_absent_where_unknown() -> None:
    timeline = Timeline()
    thin = {"blocks per SM": 0.5, "est. achieved occupancy %": 10}
    full = {"blocks per SM": 8.5, "est. achieved occupancy %": 90}
    timeline.kernel(0, 100, -10, "ampere_sgemm_128x64_nn", arguments=thin)
    timeline.kernel(200, 300, -10, "ampere_sgemm_128x64_nn", arguments=full)
    timeline.kernel(600, 300, -10, "unknown", arguments={"blocks per SM": "broken"})
    gemm, other = sorted(measured(timeline).class_times, key=lambda c: c.kernel_class)
    assert (gemm.blocks_per_sm, gemm.occupancy_ratio, gemm.underfilled_us) == (6.5, 0.7, 100)
    assert (other.blocks_per_sm, other.occupancy_ratio, other.underfilled_us) == (None, None, 0)


def test_a_kernel_that_began_before_the_window_counts_from_its_begin() -> None:
    timeline = Timeline()
    timeline.kernel(-500, 700, -600, "gemm")
    assert measured(timeline).kernel_times[0].total_us == 200


def test_streams_are_listed_with_their_own_busy_time() -> None:
    timeline = Timeline()
    timeline.kernel(0, 100, -10)
    timeline.kernel(50, 500, -10, stream="0/20")
    assert [(s.name, s.count, s.busy_us) for s in measured(timeline).streams] == [
        ("0/20", 1, 500),
        ("0/7", 1, 100),
    ]


def test_collectives_carry_what_ranks_are_compared_by() -> None:
    timeline = Timeline()
    timeline.kernel(
        100, 300, 50, "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        arguments={"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000,
           "dtype": "BFloat16", "Group size": 8, "Process Group Name": "0", "Seq": 7},
    )  # fmt: skip
    timeline.kernel(500, 100, None, "ncclKernel_Broadcast_RING_LL_Sum_int8_t")
    first, second = measured(timeline).collectives
    assert (first.name, first.process_group, first.sequence) == ("allreduce", "0", 7)
    assert (first.bytes, first.group_size) == (2000, 8)
    assert first.launched_us is not None
    assert first.begin_us - first.launched_us == 50
    assert (second.name, second.bytes, second.launched_us) == (
        "ncclKernel_Broadcast_RING_LL_Sum_int8_t", None, None,
    )  # fmt: skip
