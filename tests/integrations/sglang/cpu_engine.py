"""SGLang's `Engine` on a CPU: all of it as it is, but what copies between a device and host memory.

    with Engines.started(folder) as engines:            a process that has imported SGLang, which forks those of engines
        with engines.engine(model, ...) as engine:      `sglang.Engine`: tokenizer manager, scheduler and detokenizer
            answers = engine.ask(prompt, ...)

Its torch-native backends compute on a CPU. `install` replaces what HiCache needs a GPU for, and nothing else:

    transfer_kv_*           kernels of `sgl_kernel` that copy tokens of a pool to pages of another; here in torch
    _causal_conv1d_*        kernels of Triton that compute convolutions of recurrent layers; here in torch
    _cuda_host_register     pins host memory for copies of a GPU; here nothing
    torch_native            read windows at the places that tokens have in the pool of other layers, and had no choice
                            of its own how to compute latents; here it reads them where they are, in absorbed form
    set_start_method        SGLang spawns its processes, each of which would import it anew; here they are forked

Streams and events are those that torch has for a CPU, where a copy is done when it returns. Packages that are not
installed are replaced by stand-ins while SGLang is imported (`real_sglang`).
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch
from tests.integrations.sglang.real_sglang import page_hash, pool_modules, real
from tests.integrations.vllm.engines import Answer, environment, killed_at_the_end

PAGE = 64
_SECONDS = 600.0  # that an engine may take for anything, on a busy machine
_CUVEE = {
    "backend_name": "cuvee", "module_path": "cuvee.integrations.sglang.hicache", "class_name": "CuveeHiCache",
    "interface_v1": 1, "hicache_storage_pass_prefix_keys": True, "prefetch_threshold": PAGE,
    "lookup_timeout": 60.0, "load_timeout": 60.0,
}  # fmt: skip
_PLAIN = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "skip_tokenizer_init": True,
    "page_size": PAGE, "max_total_tokens": 2048, "context_length": 1024, "max_running_requests": 4,
    "log_level": "info", "dtype": "float32",
}  # fmt: skip


# What is replaced -------------------------------------------------------------------------------------------------

Of = torch.Tensor
Layers = Sequence[Of]


def _transfer_kv_direct(*, src_layers: Layers, dst_layers: Layers, src_indices: Of, dst_indices: Of, **_: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _transfer_kv_per_layer_direct_pf_lf(
    *, src_ptrs: Layers, dst_ptrs: Layers, src_indices: Of, dst_indices: Of, layer_id: int, page_size: int
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def _transfer_kv_all_layer_direct_lf_pf(
    *, src_ptrs: Layers, dst_ptrs: Layers, src_indices: Of, dst_indices: Of, page_size: int
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


def _transfer_kv_per_layer_pf_lf(
    *, src_k: Of, dst_k: Of, src_v: Of, dst_v: Of, src_indices: Of, dst_indices: Of, layer_id: int, **_: int
) -> None:
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[src_indices, layer_id]


def _rows(layers: Of, at: Of, size: int, target: Of) -> Iterator[tuple[int, Of]]:
    """Number and rows `[tokens, heads, dim]` of each layer of a pool, by its address."""
    for number, address in enumerate(layers.tolist()):
        held = [bytearray(ctypes.string_at(address + index * size, size)) for index in at.tolist()]
        rows = torch.stack([torch.frombuffer(each, dtype=target.dtype) for each in held])
        yield number, rows.view(len(held), -1, target.shape[-1])


def _transfer_kv_all_layer_lf_pf(
    *, src_k_layers: Of, dst_k: Of, src_v_layers: Of, dst_v: Of, src_indices: Of, dst_indices: Of, item_size: int,
    **_: int,
) -> None:  # fmt: skip
    for addresses, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, rows in _rows(addresses, src_indices, item_size, target):
            target[dst_indices, layer] = rows


def _transfer_kv_per_layer_ph_lf(
    *, src_k: Of, dst_k: Of, src_v: Of, dst_v: Of, src_indices: Of, dst_indices: Of, layer_id: int, page_size: int,
    **_: int,
) -> None:  # fmt: skip
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[src_indices // page_size, :, src_indices % page_size, layer_id]


def _transfer_kv_all_layer_lf_ph(
    *, src_k_layers: Of, dst_k: Of, src_v_layers: Of, dst_v: Of, src_indices: Of, dst_indices: Of, item_size: int,
    page_size: int, **_: int,
) -> None:  # fmt: skip
    for addresses, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, rows in _rows(addresses, src_indices, item_size, target):
            target[dst_indices // page_size, :, dst_indices % page_size, layer] = rows


def _convolve(
    x: Of, weight: Of, bias: Of | None, *, conv_states: Of, query_start_loc: Of, cache_indices: Of,
    has_initial_state: Of, **_: object,
) -> Of:  # fmt: skip
    """Sequences `[dim, tokens]` in a row, each behind its state, which it leaves behind."""
    out, ends = torch.empty_like(x), query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        own = slice(ends[number], ends[number + 1])
        seen = torch.cat([conv_states[slot] * has_initial_state[number], x[:, own]], 1)
        out[:, own] = torch.nn.functional.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
        conv_states[slot] = seen[:, 1 - weight.shape[1] :]
    return out


def _convolve_one(
    x: Of, conv_state: Of, weight: Of, *, bias: Of | None, conv_state_indices: Of, **_: object
) -> Of:  # fmt: skip
    seen = torch.cat([conv_state[conv_state_indices], x[..., None]], 2)
    conv_state[conv_state_indices] = seen[..., 1:].to(conv_state.dtype)
    return (seen * weight).sum(2) + (0 if bias is None else bias)


def _where_windows_are(attend: Any) -> Any:
    """Let attention read the keys and values of a window where SGLang's pool says that they are."""

    def attending(self: Any, *tensors: Of, sliding_window_size: int | None, **more: Any) -> Any:
        *others, req_to_token, requests, lengths = tensors[:7]
        if self.use_sliding_window_kv_pool and sliding_window_size is not None:
            req_to_token = self.token_to_kv_pool.translate_loc_from_full_to_swa(req_to_token)
        return attend(
            self, *others, req_to_token, requests, lengths, *tensors[7:], sliding_window_size=sliding_window_size,
            **more,
        )  # fmt: skip

    return attending


def _install() -> None:
    for kind in ("mha", "mla", "mamba"):
        _, pools = pool_modules(kind)
        for transfer in (
            _transfer_kv_direct, _transfer_kv_per_layer_direct_pf_lf, _transfer_kv_all_layer_direct_lf_pf,
            _transfer_kv_per_layer_pf_lf, _transfer_kv_all_layer_lf_pf, _transfer_kv_per_layer_ph_lf,
            _transfer_kv_all_layer_lf_ph,
        ):  # fmt: skip
            vars(pools)[transfer.__name__[1:]] = transfer
    vars(real("sglang.srt.mem_cache.pool_host.common"))["_cuda_host_register"] = lambda buffer, granularity: None
    convolutions = vars(real("sglang.srt.layers.attention.mamba.causal_conv1d"))
    convolutions.update(_causal_conv1d_fn_triton=_convolve, _causal_conv1d_update_triton=_convolve_one)
    attention: Any = real("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(attention, name, _where_windows_are(getattr(attention, name)))
    latents: Any = real("sglang.srt.models.deepseek_common.attention_backend_handler")
    latents.AttentionBackendRegistry.register("torch_native", lambda layer, batch: latents.AttnForwardMethod.MLA)
    multiprocessing.set_start_method("fork", force=True)
    # torch makes a pool of threads anew after a fork, for the first thread that asks, and fails for a second meanwhile.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    vars(multiprocessing)["set_start_method"] = lambda method, force: None


# In the process of an engine --------------------------------------------------------------------------------------


class _Served:
    def __init__(self, **arguments: Any) -> None:
        if ranks := arguments.get("tp_size"):  # SGLang wants to know each one's cores, and leaves them alone
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        self._engine = real("sglang.srt.entrypoints.engine").Engine(**arguments)

    def ask(self, prompts: list[list[int]]) -> list[Answer]:
        params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        said = self._engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=5)
        return [
            Answer(
                each["output_ids"],
                [{token: logprob for logprob, token, _ in at} for at in each["meta_info"]["output_top_logprobs"]],
                each["meta_info"]["cached_tokens"],
                each["meta_info"]["cached_tokens_details"],
            )
            for each in said
        ]

    def flush(self) -> bool:
        return bool(self._engine.flush_cache().success)

    def control(self, name: str, *arguments: Any) -> tuple[bool, str]:
        """A method of the tokenizer manager, as SGLang's HTTP server calls it."""
        answer = self._engine.loop.run_until_complete(getattr(self._engine.tokenizer_manager, name)(*arguments))
        return answer.success, getattr(answer, "message", "")

    def update_weights(self, path: str) -> tuple[bool, str]:
        done, message, _ = self._engine.update_weights_from_disk(path)
        return done, message

    def stop(self) -> None:
        self._engine.shutdown()


def _serve(asked: Connection, arguments: dict[str, Any]) -> None:
    served: Any = None
    while True:
        try:
            if served is None:
                served, answer = _Served(**arguments), None
            else:
                name, given = asked.recv()
                answer = getattr(served, name)(*given)
            asked.send((True, answer))
        except EOFError:
            return
        except Exception:
            asked.send((False, traceback.format_exc()))


def main(orders: Connection) -> None:
    """Fork a process for each engine that is asked for."""
    logging.disable(logging.WARNING)  # of models that SGLang cannot import
    for name in (
        "sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler", "sglang.srt.models.registry",
        "cuvee.integrations.sglang.hicache", "numba",
    ):  # fmt: skip
        real(name)
    page_hash()  # which SGLang compiles
    logging.disable(logging.NOTSET)
    _install()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported: SGLang collects garbage at every start
    while True:
        try:
            log, arguments = orders.recv()
        except EOFError:
            return
        handle = recv_handle(orders)
        if os.fork() == 0:
            orders.close()
            output = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with contextlib.suppress(BrokenPipeError):
                _serve(Connection(handle), arguments)
            os._exit(0)
        os.close(handle)


# In the process of the tests --------------------------------------------------------------------------------------


class Engine:
    """An engine in a process of its own."""

    def __init__(self, connection: Connection, log: Path) -> None:
        self._connection, self._log = connection, log
        self._answer("start")

    def ask(self, *prompts: list[int], together: bool = False) -> list[Answer]:
        """Answers of eight tokens, greedy, to prompts one after the other, or all at once."""
        batches = [list(prompts)] if together else [[prompt] for prompt in prompts]
        return [answer for batch in batches for answer in self._call("ask", batch)]

    def flush(self) -> None:
        """Empty SGLang's caches, on device and host, once all is stored: until then it refuses to."""
        end = time.monotonic() + _SECONDS
        while not self._call("flush"):
            assert time.monotonic() < end, f"SGLang does not flush its caches\n{self.log[-4000:]}"
            time.sleep(0.05)

    def update_weights(self, model: Path) -> None:
        """Take those of another checkpoint; SGLang flushes its caches, which it refuses to while it is busy."""
        self.flush()
        done, message = self._call("update_weights", str(model))
        assert done, message

    def clear_storage(self) -> None:
        assert self._call("control", "clear_hicache_storage")[0]

    def detach(self) -> dict[str, float]:
        """Detach our backend once all is stored; the counters that it logs."""
        self.flush()
        done, message = self._call("control", "detach_hicache_storage")
        assert done, message
        counters: dict[str, float] = ast.literal_eval(re.findall(r"cuvee: closed after (\{.*\})", self.log)[-1])
        return counters

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_log(self, text: str, times: int) -> None:
        """Until its processes, which do not wait for each other, have written a text this often."""
        end = time.monotonic() + _SECONDS
        while self.log.count(text) < times:
            assert time.monotonic() < end, f"{text!r} is not in the log {times} times\n{self.log[-4000:]}"
            time.sleep(0.05)

    def stop(self) -> None:
        self._call("stop")

    def _call(self, name: str, *given: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # its process has ended, as the answer says
            self._connection.send((name, given))
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        assert self._connection.poll(_SECONDS), f"{name}: no answer\n{self.log[-4000:]}"
        try:
            done, answer = self._connection.recv()
        except EOFError:
            done, answer = False, "the engine's process has ended"
        assert done, f"{name}: {answer}\n{self.log[-4000:]}"
        return answer


class Engines:
    """Starts engines.

    Args:
        folder: for their logs.
        orders: to the process that forks theirs.
        pid: its id.
    """

    def __init__(self, folder: Path, orders: Connection, pid: int) -> None:
        self._folder, self._orders, self._pid = folder, orders, pid
        self._count = 0

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[Engines]:
        """The process that has imported SGLang, and all of its engines, until the end of the context."""
        orders, theirs = Pipe()
        with orders, (folder / "log.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], stdout=output, stderr=subprocess.STDOUT,
                env=environment(), cwd=folder, start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            with killed_at_the_end(process):
                yield cls(folder, orders, process.pid)

    @contextmanager
    def engine(
        self, model: Path, store: str | None = None, layout: str = "page_first_direct", **options: Any
    ) -> Iterator[Engine]:
        """An engine, until the end of the context.

        Args:
            model: checkpoint.
            store: URL; None: without HiCache.
            layout: `--hicache-mem-layout`.
            options: of `sglang.Engine`; in `cuvee` those of our backend.
        """
        extra = json.dumps({**_CUVEE, "store": store, **options.pop("cuvee", {})})
        if store is not None:
            options = {
                "enable_hierarchical_cache": True, "hicache_mem_layout": layout, "hicache_ratio": 2.0,
                "hicache_io_backend": "kernel" if layout in ("page_first", "page_head") else "direct",
                "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": extra,
                "hicache_storage_prefetch_policy": "wait_complete", "hicache_write_policy": "write_through", **options,
            }  # fmt: skip
        # When a process started is known to a second, and what may have been written after that is not stored.
        written = max(path.stat().st_ctime for path in model.iterdir())
        time.sleep(max(0.0, written + 1.1 - time.time()))
        self._count += 1
        log = self._folder / f"engine{self._count}.txt"
        asks, theirs = Pipe()
        with asks:
            self._orders.send((str(log), {"model_path": str(model), **_PLAIN, **options}))
            send_handle(self._orders, theirs.fileno(), self._pid)
            theirs.close()
            engine = Engine(asks, log)
            try:
                yield engine
            finally:
                engine.stop()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
