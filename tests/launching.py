"""Triton's launches as far as Python goes: a driver that takes note of what the compiled launcher is handed.

Nothing is compiled and nothing runs. To be imported in a process whose Triton does not interpret.
"""

from __future__ import annotations

import gc
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from flashbench.kernels import _call, _flash_v3, _flash_v3_backward, _flash_v3_fp8, _flash_v3_wide

FLAT = hasattr(nvidia, "make_launcher")
"""Whether the launcher takes all arguments one by one, as before Triton 3.7."""
NUMBERS = {"shared": 1024, "num_warps": 4, "num_ctas": 1, "name": "k", "cluster_dims": (1, 1, 1)}
SCRATCH = {f"{of}_scratch_{what}": 0 for of in ("global", "profile") for what in ("size", "align")}
FLAGS = {"launch_cooperative_grid": False, "launch_pdl": False, "target": GPUTarget("cuda", 90, 32)}


class Driver:
    """In place of Triton's. launched: what each launch handed on; compiled: what there was to compile;
    sources: of launchers in C; described: how many descriptors were made;
    deaf: takes no note."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[Any] = []
        self.sources: set[str] = set()
        self.stream, self.device = 7, 0
        self.described, self.deaf = 0, False
        self.utils = SimpleNamespace(
            launch=self.launch, fill_tma_descriptor=self.describe, fill_tma_descriptor_tiled=self.describe,
            build_signature_metadata=tuple, unload_module=lambda module: None,
        )  # fmt: skip

    def describe(self, *args: Any) -> tuple[Any, ...]:
        """A TMA descriptor: what it is made of."""
        self.described += 1
        return tuple(map(_plain, args))

    def build(self, src: str, **_: Any) -> Any:
        """The launcher in C of its source, before Triton 3.7."""
        self.sources.add(src)
        return SimpleNamespace(launch=self.launch)

    def launch(self, *args: Any) -> None:
        """Takes note of grid, stream, function, hooks and arguments."""
        if self.deaf:
            return
        head, rest = (args[:13], args[13:]) if FLAT else (args[:-1], args[-1])
        hooks = head[10:13] if FLAT else head[8:11]
        self.launched.append((head[:5], hooks, tuple(map(_plain, rest))))

    def compile(self, src: Any, target: Any = None, options: Any = None) -> Any:
        """As much of a compiled kernel as is launched."""
        kinds = [kind for kind in src.signature.values() if str(kind).startswith("tensordesc")]
        metas = [{"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [n], "fp4_padded": False}
                 for n, _ in enumerate(kinds)]  # fmt: skip
        fields = {**NUMBERS, **SCRATCH, **FLAGS, "tensordesc_meta": metas}
        made = object.__new__(CompiledKernel)
        self.compiled.append(made)
        made.__dict__.update(
            src=src, metadata=namedtuple("Metadata", fields)(**fields), packed_metadata=(4, 1, 1024),
            name="k", module=1, function=100 + len(self.compiled), hash="", _module_pid=None,
        )  # fmt: skip
        made._run = self.launcher_cls(src, made.metadata)
        return made

    def get_current_target(self) -> GPUTarget:
        return FLAGS["target"]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream


def start_anew(made_up: Driver) -> None:
    """Triton's driver is the one that is made up, and nothing is compiled or planned yet."""
    driver.set_active(made_up)
    compiler.compile = made_up.compile
    nvidia.PyKernelArg = namedtuple("PyKernelArg", "nested_tuple type")
    nvidia.library_dirs = list
    nvidia.compile_module_from_src = made_up.build
    _call._card = lambda device: ((9, 0), 232448)
    for module in (_flash_v3.plan, _flash_v3_backward.planned, _flash_v3_wide.planned, _flash_v3_fp8.plan):
        module.cache_clear()
    for one in gc.get_objects():
        if issubclass(type(one), JITFunction):
            one.device_caches.clear()


def _plain(x: Any) -> Any:
    """An address for a tensor, a tuple for a list."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else tuple(x) if isinstance(x, list) else x
