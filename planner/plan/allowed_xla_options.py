"""XLA options that a plan may carry: those known to change only how a step runs.

Some XLA options write or read files, load libraries or end the process. People exchange
plans, so a plan carries only the options listed below, with plain values. Users set any
other option themselves, in the environment: ``XLA_FLAGS``, or ``LIBTPU_INIT_ARGS`` for
TPUs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

from whalejax.meshes.errors import Problems, quoted


_ANY = """
    exec_time_optimization_effort memory_fitting_effort xla_allow_excess_precision
    xla_backend_optimization_level xla_ignore_channel_id
    xla_disable_automatic_host_compute_offload xla_llvm_disable_expensive_passes
    xla_reduce_window_rewrite_base_length
"""
_CPU = """
    xla_cpu_copy_insertion_use_region_analysis
    xla_cpu_enable_concurrency_optimized_scheduler xla_cpu_enable_fast_math
    xla_cpu_enable_fast_min_max xla_cpu_enable_platform_dependent_math
    xla_cpu_fast_math_honor_division xla_cpu_fast_math_honor_functions
    xla_cpu_fast_math_honor_infs xla_cpu_fast_math_honor_nans xla_cpu_ftz
    xla_cpu_multi_thread_eigen xla_cpu_opt_preset xla_cpu_parallel_codegen_split_count
    xla_cpu_prefer_vector_width xla_cpu_scheduler_type xla_cpu_use_fusion_emitters
    xla_cpu_use_onednn xla_cpu_use_thunk_runtime xla_cpu_use_xnnpack
"""
_GPU = """
    xla_gpu_all_gather_combine_threshold_bytes
    xla_gpu_all_reduce_combine_threshold_bytes
    xla_gpu_analytical_latency_estimator_options xla_gpu_async_dot
    xla_gpu_autotune_gemm_rtol xla_gpu_autotune_level xla_gpu_autotune_max_solutions
    xla_gpu_collective_inflation_factor
    xla_gpu_collective_permute_combine_threshold_bytes
    xla_gpu_collective_permute_decomposer_threshold
    xla_gpu_copy_insertion_use_region_analysis xla_gpu_cublas_fallback
    xla_gpu_cudnn_gemm_fusion_level xla_gpu_cudnn_gemm_max_plans
    xla_gpu_deterministic_ops xla_gpu_disable_async_collectives
    xla_gpu_dot_merger_threshold_mb xla_gpu_enable_all_gather_combine_by_dim
    xla_gpu_enable_analytical_latency_estimator
    xla_gpu_enable_analytical_sol_latency_estimator
    xla_gpu_enable_approx_costly_collectives xla_gpu_enable_async_all_gather
    xla_gpu_enable_async_all_reduce xla_gpu_enable_async_collectives
    xla_gpu_enable_command_buffer xla_gpu_enable_cublaslt xla_gpu_enable_cudnn_fmha
    xla_gpu_enable_cudnn_frontend xla_gpu_enable_cudnn_layer_norm
    xla_gpu_enable_custom_fusions xla_gpu_enable_dynamic_slice_fusion
    xla_gpu_enable_fast_min_max xla_gpu_enable_highest_priority_async_stream
    xla_gpu_enable_host_memory_offloading xla_gpu_enable_latency_hiding_scheduler
    xla_gpu_enable_nccl_comm_splitting xla_gpu_enable_nccl_user_buffers
    xla_gpu_enable_pipelined_all_gather xla_gpu_enable_pipelined_all_reduce
    xla_gpu_enable_pipelined_collectives xla_gpu_enable_pipelined_host_offloading
    xla_gpu_enable_pipelined_p2p xla_gpu_enable_pipelined_reduce_scatter
    xla_gpu_enable_priority_fusion xla_gpu_enable_reassociation_for_converted_ar
    xla_gpu_enable_reduce_scatter_combine_by_dim
    xla_gpu_enable_reduction_epilogue_fusion xla_gpu_enable_split_k_autotuning
    xla_gpu_enable_triton_gemm xla_gpu_enable_triton_softmax_fusion
    xla_gpu_enable_while_loop_double_buffering
    xla_gpu_enable_while_loop_reduce_scatter_code_motion
    xla_gpu_enable_while_loop_unrolling xla_gpu_exclude_nondeterministic_ops
    xla_gpu_exhaustive_tiling_search xla_gpu_force_conv_nchw xla_gpu_force_conv_nhwc
    xla_gpu_ftz xla_gpu_fusion_autotune_top_k_configs
    xla_gpu_gemm_rewrite_size_threshold xla_gpu_graph_enable_concurrent_region
    xla_gpu_graph_min_graph_size xla_gpu_lhs_enable_gpu_async_tracker
    xla_gpu_memory_limit_slop_factor xla_gpu_multi_streamed_windowed_einsum
    xla_gpu_nccl_collective_max_nchannels xla_gpu_nccl_p2p_max_nchannels
    xla_gpu_normalize_layouts xla_gpu_operand_bytes_threshold_for_windowed_einsum
    xla_gpu_reduce_scatter_combine_threshold_bytes
    xla_gpu_run_post_layout_collective_pipeliner xla_gpu_shard_autotuning
    xla_gpu_simplify_all_fp_conversions xla_gpu_threshold_for_windowed_einsum_mib
    xla_gpu_triton_gemm_any xla_gpu_use_memcpy_local_p2p xla_gpu_use_runtime_fusion
"""
_TPU = """
    xla_enable_async_all_gather xla_enable_async_all_reduce
    xla_enable_async_collective_permute xla_enable_async_reduce_scatter_fusion
    xla_jf_vmem_min_overlap_to_async_copy_ratio xla_latency_hiding_scheduler_rerun
    xla_max_concurrent_async_all_gathers xla_max_concurrent_async_all_reduces
    xla_max_concurrent_async_collective_permutes
    xla_max_concurrent_async_reduce_scatters
    xla_msa_max_overlap_to_mem_size_async_copy_ratio
    xla_sc_disable_megacore_partitioning xla_sc_enable_latency_hiding_scheduler
    xla_tpu_all_gather_collective_matmul_mode xla_tpu_assign_all_reduce_scatter_layout
    xla_tpu_data_parallel_opt_different_sized_ops xla_tpu_dcn_max_overlap_estimation
    xla_tpu_decompose_all_gather_einsum xla_tpu_decompose_einsum_reduce_scatter
    xla_tpu_enable_all_reduce_scatter_fusion xla_tpu_enable_async_all_to_all
    xla_tpu_enable_async_collective_fusion
    xla_tpu_enable_async_collective_fusion_fuse_all_gather
    xla_tpu_enable_async_collective_fusion_fuse_all_reduce
    xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter
    xla_tpu_enable_async_collective_fusion_multiple_steps
    xla_tpu_enable_data_parallel_all_reduce_opt xla_tpu_enable_latency_hiding_scheduler
    xla_tpu_enable_latency_hiding_layer_scheduler xla_tpu_enable_megacore_fusion
    xla_tpu_enable_multi_compute_overlap_in_layer_scheduler
    xla_tpu_enable_sparse_core_collective_aggregator
    xla_tpu_enable_sparse_core_collective_offload_2d_all_gather
    xla_tpu_enable_sparse_core_collective_offload_3d_all_gather
    xla_tpu_enable_sparse_core_collective_offload_all_gather
    xla_tpu_enable_sparse_core_collective_offload_all_reduce
    xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter
    xla_tpu_enable_sparse_core_collective_offload_reduce_scatter
    xla_tpu_megacore_fusion_allow_ags xla_tpu_overlap_compute_collective_tc
    xla_tpu_rwb_fusion xla_tpu_scheduler_percent_shared_memory_limit
    xla_tpu_scoped_vmem_limit_kib xla_tpu_use_enhanced_launch_barrier
    xla_tpu_use_repeated_instance_for_preferred_prefetch_time
"""
KNOWN: Final = frozenset(f"{_ANY} {_CPU} {_GPU} {_TPU}".split())
"""Options that neither read nor write files, load code nor print a program."""

_WORDS = re.compile(r"[A-Za-z0-9_.,=+-]{0,200}")
"""Text values: names, numbers and lists of them; no paths."""


def check_options(options: Mapping[str, Any], problems: Problems) -> None:
    """Records options that a plan may not carry.

    Args:
        options: Options by name.
        problems: Collector of the errors.
    """
    for name, value in options.items():
        if name not in KNOWN:
            problems.add(_unknown(name))
        elif isinstance(value, str) and not _WORDS.fullmatch(value):
            problems.add(
                f"{name} is {quoted(value)}; expected a number, true or false, or a "
                "name without blanks and slashes"
            )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name[:100], sorted(KNOWN), n=1, cutoff=0.8)
    nearest = f"Nearest: {near[0]}. " if near else ""
    return (
        f"{quoted(name)} is not among the {len(KNOWN)} options that a plan may carry "
        f"(such as xla_tpu_enable_async_collective_fusion). {nearest}Set another in "
        "the environment of the process: XLA_FLAGS, or LIBTPU_INIT_ARGS for a TPU's"
    )
