"""What an engine's environment variables add to the identity of its caches: every one that is set to another value than
its default, except those that cannot matter.

A variable that this version does not know counts as soon as it is set. Values are hashed: some variables hold secrets,
and identities are logged. Variables are listed, with the reason, by the rule of `engine_config`.
"""

from __future__ import annotations

import hashlib
import os
import types
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_Listed = Mapping[str, str]  # patterns of names that are left out, by the reason

VLLM_VARIABLES: _Listed = {
    "how vLLM is built, found and installed": (
        "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED* VLLM_SKIP_* VLLM_DOCKER_* VLLM_BUILD_* "
        "VLLM_IMAGE_TAG VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_*_CACHE_PATH VLLM_ASSETS_CACHE* VLLM_TUNED_CONFIG_FOLDER "
        "VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_*CUDA_COMPATIBILITY* VLLM_RUST_* "
        "VLLM_USE_RUST_* VLLM_HAS_FLASHINFER_CUBIN VLLM_*_CACHE_DIR VLLM_USE_MODELSCOPE"
    ),
    "addresses, ports, ranks and processes": (
        "VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_* VLLM_DP_* VLLM_RAY_* VLLM_USE_RAY_* VLLM_WORKER_* "
        "VLLM_*_SIDE_CHANNEL_* VLLM_P2P_* VLLM_MOONCAKE_* VLLM_ENABLE_V1_MULTIPROCESSING VLLM_PROCESS_NAME_PREFIX "
        "VLLM_PP_LAYER_PARTITION VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_ELASTIC_EP_* "
        "VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_MQ_* "
        "VLLM_DIST_IDENT VLLM_MSGPACK_* VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_USE_SPINLOOP_EXT "
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"
    ),
    "logs, figures, profiles and checks": (
        "VLLM_LOG* VLLM_*LOGGING* VLLM_DEBUG_* VLLM_*_DEBUG VLLM_TRACE_FUNCTION VLLM_USAGE_* VLLM_NO_USAGE_STATS "
        "VLLM_DO_NOT_TRACK VLLM_DISABLE_LOG_LOGO VLLM_*_FOR_PROFILING VLLM_COMPUTE_NANS_IN_LOGITS VLLM_GPU_SYNC_CHECK "
        "VLLM_RAISE_ON_LOGIT_NANS VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_CPU_CI_ENV"
    ),
    "how long the engine waits": "VLLM_*TIMEOUT VLLM_*TIMEOUT_S VLLM_*TIMEOUT_SECONDS VLLM_*TIMEOUT_KEEP_ALIVE",
    "the server, its clients and its secrets": (
        "VLLM_API_KEY VLLM_SERVER_DEV_MODE VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS "
        "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_*"
    ),
    "how tokens are made of text and chosen; they are in the key": (
        "VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_V1_USE_OUTLINES_CACHE "
        "VLLM_XGRAMMAR_* VLLM_TOOL_* VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
        "VLLM_GPT_OSS_* VLLM_SYSTEM_START_DATE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
    ),
    "images are named by what the encoder gets": (
        "VLLM_MEDIA_* VLLM_MAX_MEDIA_* VLLM_MAX_AUDIO_* VLLM_MAX_EMBED_* VLLM_MAX_IMAGE_PIXELS VLLM_VIDEO_*"
    ),
    "memory, and the engine's own pages": (
        "VLLM_CPU_KVCACHE_SPACE VLLM_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT VLLM_ENABLE_CUDAGRAPH_GC "
        "VLLM_*_PIN_MEMORY VLLM_*_DISABLE_UVA VLLM_KV_OFFLOAD_* VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_*_BUFFER_SIZE "
        "VLLM_*_BUFFER_SIZE_MB VLLM_MEMORY_PROFILER_* "
        "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_FASTSAFETENSORS_QUEUE_SIZE"
    ),
    "how the same function is compiled and run": (
        "VLLM_*COMPILE* VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK "
        "VLLM_USE_AOT_* VLLM_FORCE_AOT_LOAD VLLM_USE_MEGA_AOT_ARTIFACT VLLM_ENABLE_INDUCTOR_* VLLM_TRITON_* "
        "VLLM_USE_V2_MODEL_RUNNER VLLM_ENABLE_STARTUP_PLAN VLLM_DEEP_GEMM_WARMUP VLLM_FLASHINFER_AUTOTUNE_* "
        "VLLM_*_STREAM VLLM_*_STREAM_TOKEN_THRESHOLD VLLM_CPU_ATTN_SPLIT_KV VLLM_SKIP_P2P_CHECK VLLM_DISABLE_PYNCCL "
        "VLLM_USE_LAYERNAME VLLM_RANDOMIZE_DP_DUMMY_INPUTS"
    ),
}  # fmt: skip

SGLANG_VARIABLES: _Listed = {
    "tests and checks": "SGLANG_TEST_* SGLANG_IS_IN_CI* SGLANG_KV_CANARY_* SGLANG_*_CHECK SGLANG_*_CHECKER",
    "logs, figures and profiles": (
        "SGLANG_LOG_* SGLANG_*_LOG_* SGLANG_PROFILE_* SGLANG_TRACE_* SGLANG_*_TRACE SGLANG_OTLP_* SGLANG_ENABLE_NVTX_* "
        "SGLANG_RECORD_STEP_TIME SGLANG_TORCH_PROFILER_DIR SGLANG_CUDA_COREDUMP* SGLANG_ENABLE_METRICS_* "
        "SGLANG_PYSPY_* SGLANG_DETECT_SLOW_RANK"
    ),
    "addresses, ports, ranks and processes": (
        "SGLANG_PORT SGLANG_*_PORT SGLANG_BACKUP_PORT_BASE SGLANG_HTTP_* SGLANG_ZMQ_* SGLANG_USE_PICKLE_IPC "
        "SGLANG_SET_CPU_AFFINITY SGLANG_NUMA_BIND_V2 SGLANG_AUTO_NUMA_BIND SGLANG_CRASH_ON_NUMA_BIND_FAILURE "
        "SGLANG_GRPC_* SGLANG_UVICORN_* SGLANG_HOST_IP SGLANG_BLOCK_NONZERO_RANK_CHILDREN SGLANG_USE_MODELSCOPE "
        "SGLANG_WEIGHT_CACHE_* SGLANG_DP_RANK SGLANG_RUN_ID SGLANG_CPU_OMP_THREADS_BIND"
    ),
    "how long the engine waits": "SGLANG_*TIMEOUT SGLANG_*TIMEOUT_S SGLANG_*TIMEOUT_SECS SGLANG_TIMEOUT_KEEP_ALIVE",
    "how tokens are chosen; they are in the key": "SGLANG_GRAMMAR_* SGLANG_*_OUTLINES_* SGLANG_*LOGPROB*",
    "the engine's own pages": "SGLANG_HICACHE_*",
}  # fmt: skip


# Without the prefix: SGLang, and the kernels that it calls, choose by them in how many bits they compute.
_SGLANG_OTHERS = (
    "AITER_FORCE_A8W4", "AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "FLASHINFER_NVFP4_4OVER6*",
    "DEEP_NORMAL_MODE_USE_INT8_QUANT",
)  # fmt: skip


def vllm_environment() -> dict[str, str]:
    """Return the variables of vLLM that belong to an identity: a digest of the value by the name."""
    from vllm import envs

    def is_default(name: str) -> bool:
        read = envs.environment_variables[name]
        # The same code in a process without variables; vLLM's readers know their defaults, and nothing else does.
        unset = types.FunctionType(
            read.__code__, {**read.__globals__, "os": _Unset()}, read.__name__, read.__defaults__, read.__closure__
        )
        return bool(read() == unset())

    return _environment(("VLLM_*",), VLLM_VARIABLES, is_default)


def sglang_environment() -> dict[str, str]:
    """Return the variables of SGLang that belong to an identity, as `vllm_environment` does."""
    from sglang.srt.environ import envs

    def is_default(name: str) -> bool:
        field = vars(type(envs))[name]
        return bool(field.get() == field._resolve_default())

    return _environment(("SGLANG_*", *_SGLANG_OTHERS), SGLANG_VARIABLES, is_default)


def _environment(names: tuple[str, ...], listed: _Listed, is_default: Callable[[str], bool]) -> dict[str, str]:
    left_out = [pattern for given in listed.values() for pattern in given.split()]
    found = {}
    for name, value in os.environ.items():
        if not _any(name, names) or _any(name, left_out):
            continue
        try:
            if is_default(name):
                continue
        except Exception:  # unknown to this version, or a value that it does not read: it counts as it is written
            pass
        found[name] = hashlib.blake2b(value.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return dict(sorted(found.items()))


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Unset:
    """The module `os` in a process without variables."""

    environ: Mapping[str, str] = types.MappingProxyType({})

    @staticmethod
    def getenv(name: str, default: str | None = None) -> str | None:
        return default

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)
