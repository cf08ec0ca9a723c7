"""ptxas is heard where it makes products wait; the tests of flash-v3's kernels rest on its silence."""

from __future__ import annotations

import pytest
from hopper_ptxas import complaints

pytest.importorskip("triton")

PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd2, %rd3, 1, 1, 1, 0, 0;"
COMMIT = "wgmma.commit_group.sync.aligned;"
READ = "st.global.f32 [%rd1+16], %f1;"
KERNEL = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry products(.param .u64 out, .param .u64 a, .param .u64 b)
{{
    .reg .b64 %rd<4>;
    .reg .f32 %f<5>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [a];
    ld.param.u64 %rd3, [b];
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, 0f00000000;
    mov.f32 %f3, 0f00000000;
    mov.f32 %f4, 0f00000000;
    wgmma.fence.sync.aligned;
    {}
    wgmma.wait_group.sync.aligned 0;
    {}
    st.global.v4.f32 [%rd1], {{%f1, %f2, %f3, %f4}};
    ret;
}}
"""
"""With what stands before the wait and what behind it."""


def test_products_that_ptxas_serialises_are_told() -> None:
    [told] = complaints(KERNEL.format(PRODUCT + READ + PRODUCT + COMMIT, ""))
    assert "Potential Performance Loss: wgmma.mma_async instructions are serialized due to" in told


def test_a_wait_that_ptxas_puts_in_is_told() -> None:
    [told] = complaints(KERNEL.format(PRODUCT + COMMIT + READ, ""))
    assert "is injected" in told


def test_products_that_run_on_are_not() -> None:
    assert complaints(KERNEL.format(PRODUCT + PRODUCT + COMMIT, READ)) == []


def test_a_compiler_that_keeps_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.backends.nvidia.compiler as nvidia

    monkeypatch.setattr(nvidia.CUDABackend, "make_cubin", lambda *_: b"")
    with pytest.raises(AssertionError, match="not ptxas' words"):
        complaints(KERNEL.format(PRODUCT + COMMIT, READ))
