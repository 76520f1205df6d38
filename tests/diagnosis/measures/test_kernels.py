"""The class of a kernel, by its name."""

from __future__ import annotations

import pytest

from warpwatch_diagnosis.measures.kernels import classify

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
