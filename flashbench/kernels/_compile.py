"""Ahead-of-time compilation of the flash kernels, in parallel, into Triton's own cache.

A compiled kernel depends on dtypes, compile-time constants and the divisibility of strides, not on
data, so meta tensors and the name of an architecture are enough: no GPU is needed, nor touched.
The workers are spawned, as a forked process must not use CUDA again, and as Triton compiles only
where it was not imported as an interpreter.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Any

from flashbench import hopper_configs, kernels
from flashbench.decode_configs import DecodeConfig
from flashbench.errors import UnavailableError
from flashbench.flash_configs import Config
from flashbench.kernels import Target, _triton
from flashbench.problem import DTYPES, Cell, Problem

if TYPE_CHECKING:
    from flashbench.kernels._call import Launch


@dataclass(frozen=True)
class Task:
    """One kernel to compile; config takes the place of the table's.

    page_size, fp8_cache: of the cache of a decode, 0 and False being a contiguous one in q's dtype.
    gpu: an AMD GPU as LLVM names it (gfx942) to compile for; empty for NVIDIA's of the capability.
    """

    kernel: str
    problem: Problem
    capability: tuple[int, int]
    limit: int | None = None
    config: Config | DecodeConfig | None = None
    implementation: str = "flash-v2"
    page_size: int = 0
    fp8_cache: bool = False
    gpu: str = ""

    @property
    def target(self) -> tuple[str, int | str, int]:
        """Backend, architecture and lanes of a warp, as Triton asks for them."""
        if self.gpu:
            return "hip", self.gpu, 64
        return "cuda", 10 * self.capability[0] + self.capability[1], 32


@dataclass(frozen=True)
class Compiled:
    """What became of a task; error says why it did not compile, and is empty on success.

    shared_bytes: dynamic shared memory; tensor_memory_columns: of 128 lanes of 4 bytes, used from
    sm_100 on. options: what the kernel was launched with (BLOCK_M, num_warps, …). usage and sass:
    what cuobjdump says of its resources and its machine code as nvdisasm writes it, both empty where
    nobody asked and where unread says why they are not to be had. For an AMD GPU sass is its assembly.
    ptx: what ptxas made the machine code of, where that was asked for.
    """

    task: Task
    shared_bytes: int = 0
    tensor_memory_columns: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    usage: str = ""
    sass: str = ""
    ptx: str = ""
    unread: str = ""
    error: str = ""


def precompile(cells: Sequence[Cell], target: Target) -> None:
    """Compile what the cells will launch on the target, each kernel once, before anything is timed.

    Kernels that Triton's cache holds are loaded here, which their first launch would do; workers
    start for the others only. What launches a kernel is built too. A kernel that does not compile is
    left to the cell that needs it, which then says why.
    """
    if target.capability is None or not cells:
        return
    tasks: dict[tuple[object, ...], Task] = {}
    for cell in cells:
        limits = target.capability, target.smem_per_block_bytes
        whole = Task("", cell.problem, *limits, implementation=cell.implementation)
        for one in rehearse(whole, cell.pass_):
            tasks.setdefault(one.key, replace(whole, kernel=one.name))
    import torch

    with torch.cuda.device(target.device):
        missing = lacking(tasks.values())
        done = compile_all(missing) if len(missing) > 1 else [Compiled(task) for task in missing]
        broken = {one.task for one in done if one.error}
        build_launchers(task for task in tasks.values() if task not in broken)


def build_launchers(tasks: Iterable[Task]) -> None:
    """Build what launches the kernels of the tasks, for the active device.

    Triton 3.6 writes a C module for every new list of arguments and has it compiled at the first launch,
    half a second each; here as many at once as there are cores. Kernels are in Triton's cache by now.
    """
    from triton.runtime import driver

    def build(kernel: Any) -> None:
        with suppress(Exception):  # the cell will meet it again, and name it
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for task in tasks:
            with suppress(Exception):
                pool.submit(build, launch(task).compile())


def lacking(tasks: Iterable[Task]) -> list[Task]:
    """The tasks whose kernels are not in Triton's cache, for the active device; compiles nothing."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class Absent(Exception):
        """Raised where Triton would go on to compile."""

    # mypy cannot know the class that the environment chooses
    class LookUp(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> dict[str, str]:
            group: dict[str, str] | None = super().get_group(filename)
            if not group or filename not in group or knobs.compilation.always_compile:
                raise Absent
            return group

    missing = []
    with knobs.cache.scope():
        knobs.cache.manager_class = LookUp
        for task in tasks:
            try:
                launch(task).compile()
            except Exception:  # absent, or whatever else a worker or the cell will meet again and name
                missing.append(task)
    return missing


def compile_all(tasks: Iterable[Task], workers: int | None = None, inspect: bool = False) -> list[Compiled]:
    """Compile every task, in spawned processes; with inspect the machine code is read too.

    Raises UnavailableError where they cannot import Triton, UsageError where it has no usable cache.
    """
    return list(compile_each(tasks, workers, inspect))


def compile_each(
    tasks: Iterable[Task], workers: int | None = None, inspect: bool = False
) -> Generator[Compiled]:
    """As ``compile_all``, each in turn; what is not asked for any more when this is closed is given up."""
    tasks = list(tasks)
    if not tasks:
        return
    _triton.check_cache()
    workers = min(len(tasks), workers or len(os.sched_getaffinity(0)))
    pool = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_begin_worker,
    )
    try:
        futures = [pool.submit(compile_one, task, inspect) for task in tasks]
        for task, future in zip(tasks, futures, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                yield Compiled(task, error=f"the compiling process died: {error}")
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits for what is being compiled, no more


def _begin_worker() -> None:
    # Ctrl-C goes to every process of a terminal; the one that asked alone answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # without tearing the interpreter down, over which Triton 3.9 reports leaks of its Gluon compiler
    atexit.register(os._exit, 0)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for ever: the queue of its tasks has other writers left."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def compile_one(task: Task, inspect: bool = False) -> Compiled:
    """Compile one task in this process, which must not hold Triton as an interpreter.

    Raises UnavailableError where Triton cannot be imported.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except Exception as error:  # a broken installation raises whatever it likes
        raise UnavailableError(_triton.why_broken(error)) from None

    triton.runtime.driver.set_active(_NoDevice(GPUTarget(*task.target)))
    options: Mapping[str, Any] = {}
    try:
        one = launch(task)
        options = one.options
        kernel = one.compile()
    except Exception as error:  # whatever the compiler raises is the result
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton wraps the cause once for every call in the source
            cause = cause.__cause__
        return Compiled(task, options=options, error=f"{type(cause).__name__}: {cause}")
    usage, sass, unread = _read(kernel.asm) if inspect else ("", "", "")
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    options = {**options, "num_warps": kernel.metadata.num_warps}  # of a specialised kernel, all together
    ptx = kernel.asm.get("ptx", "") if inspect else ""
    return Compiled(task, kernel.metadata.shared, columns, options, usage, sass, ptx, unread)


def launch(task: Task) -> Launch:
    """The task's launch, on meta tensors. Raises StopIteration for a kernel that is not launched."""
    return bundled(task).launch(task)


def rehearse(task: Task, pass_: str) -> tuple[Launch, ...]:
    """All that the task's implementation launches for its problem in the pass, on meta tensors.

    The call itself is made, as ``run`` makes it: there is no second opinion on what is launched.
    """
    return _rehearse(task if task.config else replace(task, kernel=""), pass_)


@lru_cache(maxsize=1024)
def _rehearse(task: Task, pass_: str) -> tuple[Launch, ...]:
    import torch

    from flashbench.kernels import _call
    from flashbench.kernels._inputs import make_inputs
    from flashbench.kernels._kernels_of import TILE

    gradients = pass_ != "fwd"
    inputs = make_inputs(task.problem, "meta", 0).detached(grad=gradients)
    prepare = kernels.get(task.implementation).prepare_tiles
    assert prepare is not None
    kernel = bundled(task).described.get(task.kernel, task.kernel)
    tiles = {f"{kernel}_{one}": getattr(task.config, one) for one in TILE} if task.config else {}
    with _call.rehearsed((task.capability, task.limit)) as launches, torch.set_grad_enabled(gradients):
        o = prepare(task.problem, inputs, tiles)()
        if gradients:
            torch.autograd.grad(o, inputs.leaves, inputs.dout)
    return tuple(launches)


def _rehearsed(task: Task) -> Launch:
    forward = task.kernel in bundled(task).kernels["fwd"]
    launches = rehearse(task, "fwd" if forward else "bwd")
    return next(one for one in launches if one.name == task.kernel)


@dataclass(frozen=True)
class Bundled:
    """Kernels that can be compiled ahead of time: those of each pass, and how one is launched.

    kernels: those that every problem needs; some launch more (the gradient of a bias).
    described: what a kernel is called in a configuration, where that is not its own name.
    """

    kernels: Mapping[str, tuple[str, ...]]
    launch: Callable[[Task], Launch] = _rehearsed
    described: Mapping[str, str] = field(default_factory=dict)


def _flash_decode(task: Task) -> Launch:
    """One of the two kernels, as launched where there are several splits."""
    import torch

    from flashbench.kernels import _flash_decode as flash

    p = task.problem
    dtype = getattr(torch, DTYPES[p.dtype].torch_name)
    q = torch.empty(p.batch, p.num_heads, p.seqlen_q, p.head_dim, dtype=dtype, device="meta")
    pages = -(-p.seqlen_k // task.page_size) if task.page_size else 0
    shape = (
        (p.batch * pages, task.page_size, p.num_kv_heads) if pages else (p.batch, p.num_kv_heads, p.seqlen_k)
    )
    k, v = (
        torch.empty(*shape, dim, dtype=flash.FP8 if task.fp8_cache else dtype, device="meta")
        for dim in (p.head_dim, p.head_dim_v)
    )
    scale = torch.empty(1, device="meta") if task.fp8_cache else None
    table = torch.empty(p.batch, pages, dtype=torch.int32, device="meta") if pages else None
    used = torch.empty(p.batch, dtype=torch.int32, device="meta")
    cache = flash.Cache(k=k, v=v, seqused_k=used, block_table=table, k_descale=scale, v_descale=scale)
    call = flash.Call(
        causal=p.causal, scale=p.softmax_scale, tf32=p.dtype == "tf32", num_splits=2,
        card=(task.capability, task.limit, 1), amd=bool(task.gpu),
        config=task.config if isinstance(task.config, DecodeConfig) else None,
    )  # fmt: skip
    launches = flash.launches(q, cache, call)[2]
    return next(one for one in launches if one.name == task.kernel)


_PORTABLE = Bundled({"fwd": ("fwd",), "bwd": ("delta", "dkdv", "dq")})
_PORTABLE_FP8 = Bundled({"fwd": ("fwd",), "bwd": ()})
_V3_WIDE = Bundled({"fwd": ("v3_fwd",), "bwd": ("v3_prepare", "v3_dkdv", "v3_dq")})
"""flash-v3's of head dims for which its backward is two kernels."""
BUNDLED = {
    "flash": _PORTABLE,
    "flash-v1": Bundled(
        {"fwd": ("v1_fwd",), "bwd": ("v1_bwd",)}, described={"v1_fwd": "fwd", "v1_bwd": "bwd"}
    ),
    "flash-v2": _PORTABLE,
    "flash-v2-atomic": Bundled(
        {"fwd": ("fwd",), "bwd": ("delta", "clear", "atomic", "convert")}, described={"atomic": "bwd"}
    ),
    "flash-v3": Bundled({"fwd": ("v3_fwd",), "bwd": ("v3_prepare", "v3_bwd", "v3_convert")}),
    "flash-v3-fp8": Bundled({"fwd": ("v3_fp8",), "bwd": ()}),
    "flash-fp8": _PORTABLE_FP8,
    "flash-v2-fp8": _PORTABLE_FP8,
    "flash-decode": Bundled({"fwd": ("decode", "merge")}, _flash_decode),
}
"""Every implementation with such kernels, by name."""


def bundled(task: Task) -> Bundled:
    """The kernels of the task's implementation, or of that which it runs in place of its own there."""
    target = Target(device="cuda", capability=task.capability, smem_per_block_bytes=task.limit)
    name = kernels.get(task.implementation).runs(task.problem, target) or task.implementation
    wide = name == "flash-v3" and hopper_configs.wide(task.problem.head_dim, task.problem.head_dim_v)
    return _V3_WIDE if wide else BUNDLED[name]


class _NoDevice:
    """As much of a Triton driver as compiling for an architecture needs."""

    def __init__(self, architecture: Any) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        return self.architecture

    def get_current_device(self) -> int | str:
        """A device for every architecture: Triton keeps what it compiles, and for what, by device."""
        number: int | str = self.architecture.arch
        return number

    def get_current_stream(self, device: int | str) -> int:
        return 0


def _read(asm: Mapping[str, Any]) -> tuple[str, str, str]:
    """(resource usage, machine code, why there is neither) of a kernel, as its maker's tools write them."""
    from triton import knobs

    if "amdgcn" in asm:
        return "", asm["amdgcn"], ""
    try:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
            return usage, _run(knobs.nvidia.nvdisasm.path, "-c", file.name), ""
    except (OSError, RuntimeError) as error:  # Triton's word for a tool that is missing
        return "", "", f"no disassembler: {error}"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        return "", "", f"{os.path.basename(error.cmd[0])} failed: {said[-1] if said else error.returncode}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
