"""Compiles the kernels that round to fp8 for sm_90 and prints what came out, a line of JSON each."""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from flashbench.kernels import _call, _compile, _fp8_rounding

triton.runtime.driver.set_active(_compile._NoDevice(GPUTarget("cuda", 90, 32)))
dtype, width, block = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
x = torch.empty(1, 16, 4096, width, dtype=torch.bfloat16, device="meta")
with _call.rehearsed(((9, 0), 232448)) as launches:
    _fp8_rounding.quantise(x, dtype, block)
    _fp8_rounding.interleaved(x, dtype, block)
    _fp8_rounding.centred(x, dtype, block)
for launch in launches:
    compiled = launch.compile()
    print(json.dumps({"name": launch.name, "sass": _compile._read(compiled.asm)[1]}))
