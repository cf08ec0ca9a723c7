"""flash-v3's launches hand Triton's launcher what Triton itself would, with little done in Python.

In a process whose Triton compiles for an sm_90 card that is made up (launching.py); nothing is compiled.
Every launch there is also made by Triton and compared.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
LOG2E = math.log2(math.e)
GRADIENTS = [(64, 64), (96, 128), (40, 72), (256, 256), (192, 128)]
CASES: dict[str, Callable[[Any], None]] = {}


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run in the process with the driver that is made up."""
    CASES[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What went wrong, by case."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def inputs(dims: tuple[int, int] = (64, 64), rows: int = 65, *, turned: bool = False, **more: Any):
    """q, k and v that require grad; turned: rows before heads in memory."""
    dtype, kv_heads = more.get("dtype", torch.float16), 2
    made = []
    for heads, dim in ((4, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1])):
        shape = (2, rows, heads, dim) if turned else (2, heads, rows, dim)
        x = torch.zeros(shape, dtype=dtype)
        made.append((x.transpose(1, 2) if turned else x).requires_grad_())
    return made


def gradients(leaves: list[Tensor], of_lse: bool = False, **options: Any) -> tuple[Tensor, ...]:
    from flashbench.kernels import _flash_v3 as flash

    outputs = flash.flash_attention(*leaves, return_lse=True, **options)[: 1 + of_lse]
    return torch.autograd.grad(outputs, leaves, [torch.zeros_like(x) for x in outputs])


def backward(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, **more: Tensor) -> None:
    """Of the kernels alone, which is told what the forward made."""
    from flashbench import hopper_configs
    from flashbench.kernels import _flash_v3_backward as narrow
    from flashbench.kernels import _flash_v3_wide as wide
    from flashbench.kernels._call import Call
    from flashbench.kernels._launches import Saved

    saved, call = Saved(q=q, k=k, v=v, **more), Call(causal=False, scale=scale)
    module = wide if hopper_configs.wide(q.shape[3], v.shape[3]) else narrow
    module.backward_launches(saved, call).run(saved)


@case
def every_launch_is_tritons(made_up) -> None:
    """Both passes, forms of the backward, layouts, masks and dtypes."""
    for dims in GRADIENTS:
        for causal in (False, True):
            gradients(inputs(dims), causal=causal)
            gradients(inputs(dims, turned=True), of_lse=True, causal=causal, softmax_scale=1.0)
        gradients(inputs(dims, dtype=torch.bfloat16), deterministic=True)
    gradients(inputs(rows=1))
    names = [launch.name for launch in made_up.compared]
    assert {*names} == {"v3_fwd", "v3_prepare", "v3_bwd", "v3_convert", "v3_dkdv", "v3_dq"}


@case
def so_it_is_in_fp8(made_up) -> None:
    from flashbench import hopper_configs
    from flashbench.kernels import _flash_v3_fp8 as flash

    q, k, v = (x.detach() for x in inputs())
    for dtype, keys in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), (512, 16384)):
        tiles = hopper_configs.choose_fp8(128, 128, True, keys)
        operands = flash.operands(q, k, v, dtype=dtype, causal=True, tiles=tiles)
        for out in (torch.float16, torch.float32):
            flash.flash_attention(operands, causal=True, out_dtype=out)
    assert [launch.name for launch in made_up.compared] == ["v3_fp8"] * 8


@case
def means_of_v_lie_as_the_kernel_in_fp8_reads_them(made_up) -> None:
    """All columns of a box, one after the other, however v lies."""
    from flashbench import hopper_configs
    from flashbench.kernels import _flash_v3_fp8 as flash

    for dim_v, turned, keys in itertools.product((48, 112, 128), (False, True), (512, 16384)):
        q, k, v = (x.detach() for x in inputs((128, dim_v), turned=turned))
        v += torch.arange(2.0)[:, None, None] + 1
        tiles = hopper_configs.choose_fp8(128, dim_v, True, keys)
        found = flash.operands(q, k, v, dtype=torch.float8_e4m3fn, causal=True, tiles=tiles)
        assert (found.mean is None) == (keys == 512)
        if found.mean is not None:
            assert found.mean.is_contiguous()
            assert found.mean.shape == (2, 2, 64 if dim_v == 48 else 128)
            assert found.mean.sum((0, 2)).tolist() == [2 * dim_v, 4 * dim_v]
            assert not found.v.values.float().any()
        flash.flash_attention(found, causal=True)
    assert len(made_up.compared) == 12


@case
def tensors_may_overlap_move_and_be_given_up(made_up) -> None:
    """One tensor for all; the same layout elsewhere in one storage; others at the same address."""
    x = torch.zeros(2, 2, 65, 64, dtype=torch.float16, requires_grad=True)
    gradients([x, x, x])
    base = torch.zeros(2, 2, 65, 256, dtype=torch.float16)
    for start in (0, 64, 192, 64):
        gradients([base[..., start : start + 64].requires_grad_() for _ in range(3)])
    for shape in ((2, 2, 65, 64), (1, 4, 65, 64), (4, 1, 65, 64), (2, 2, 65, 64)):
        gradients([base.flatten()[: 4 * 65 * 64].view(shape).requires_grad_() for _ in range(3)])
    for rows in (65, 64, 65):
        gradients(inputs(rows=rows))
        gc.collect()
    assert len(made_up.compared) == 4 * (1 + 4 + 4 + 3)


@case
def each_tensor_lies_as_it_likes(made_up) -> None:
    """Of o and its gradient heads may be inside or outside rows, one between others or in a wider one."""
    for dims in ((64, 64), (192, 64)):
        q, k, v = (x.detach() for x in inputs(dims))
        wide = torch.zeros(2, 65, 4, 80, dtype=q.dtype).transpose(1, 2)
        inside = torch.zeros(2, 65, 4, 64, dtype=q.dtype).transpose(1, 2)
        ways = wide[..., 8:72], inside, inside.contiguous()
        for o, do in itertools.product(ways, repeat=2):
            backward(q, k, v, o=o, do=do, lse=torch.zeros(q.shape[:3]))
    assert len(made_up.compared) == 2 * 9 * 3


@case
def no_tensor_is_kept(made_up) -> None:
    leaves = inputs()
    found = [weakref.ref(x) for x in (*leaves, *gradients(leaves))]
    del leaves
    made_up.compared.clear()
    gc.collect()
    assert [x() for x in found] == [None] * 6


@case
def what_a_captured_launch_reads_outlives_its_plan(made_up) -> None:
    """A graph is replayed with the addresses that it has; the caller holds tensors, nobody the schedules."""
    from flashbench.kernels import _flash_v3 as flash
    from flashbench.kernels import _flash_v3_backward as narrow
    from flashbench.kernels import _flash_v3_wide as wide
    from flashbench.kernels import _hopper_ready as ready

    def schedules(dims: tuple[int, int], rows: int) -> list[weakref.ref[Tensor]]:
        """Those of a call of both passes, whose plans are dropped."""
        made_up.compared.clear()
        gradients(inputs(dims, rows))
        fixed = [x for launch in made_up.compared for x in launch.ready.fixed]
        found = [weakref.ref(x) for x in fixed if isinstance(x, Tensor)]
        made_up.compared.clear()
        for planned in (flash.plan, narrow.planned, wide.planned):
            planned.cache_clear()
        del fixed
        gc.collect()
        return found

    plain = ready._capturing
    assert not plain()
    for dims, count in (((64, 64), 2), ((256, 256), 3)):
        assert [x() for x in schedules(dims, 127)] == [None] * count
        ready._capturing = lambda: True
        try:
            kept = schedules(dims, 129)
        finally:
            ready._capturing = plain
        assert len([x for x in kept if x() is not None]) == len(kept) == count
        gradients(inputs(dims, 129))


@case
def scales_and_streams_are_those_of_the_call(made_up) -> None:
    leaves = inputs()
    for scale, stream in ((0.125, 7), (0.5, 7), (0.5, 8), (0.125, 7)):
        made_up.driver.stream = stream
        made_up.driver.launched.clear()
        gradients(leaves, softmax_scale=scale)
        launched = made_up.driver.launched
        assert {head[3] for head, *_ in launched} == {stream}
        for launch, (*_, args) in zip(made_up.doubled(made_up.compared[-4:]), launched, strict=True):
            wanted = {"v3_fwd": scale * LOG2E, "v3_bwd": scale * LOG2E, "v3_convert": scale}
            assert wanted.get(launch.name, args[-1]) in args
    q, k, v = (x.detach() for x in leaves)
    for scale in (1, 2, 0.3):
        backward(q, k, v, scale, o=q, do=q, lse=torch.zeros(q.shape[:3]))
    assert len(made_up.driver.compiled) == 4


@case
def what_a_kernel_was_not_compiled_for_has_one_of_its_own(made_up) -> None:
    """Rows at an odd address, first or later, another dtype of theirs, a gradient of them or none."""
    q, k, v = (x.detach() for x in inputs(rows=63))
    rows = torch.zeros(2 * 4 * 63 + 1)
    even, odd = (rows[n : n + 2 * 4 * 63].view(2, 4, 63) for n in (0, 1))

    def functions(lse: Tensor, **more: Any) -> int:
        made_up.driver.launched.clear()
        backward(q, k, v, o=q, do=q, lse=lse, **more)
        head, *_ = made_up.driver.launched[0]
        assert made_up.compared[-3].name == "v3_prepare"
        return int(head[4])

    found = [functions(x) for x in (odd, even, odd, even)]
    found += [functions(even.double()), *(functions(even, dlse=x) for x in (even, odd)), functions(even)]
    assert found[:2] == found[2:4]
    assert found[7] == found[1]
    assert len({*found}) == 5


@case
def a_descriptor_is_made_once_and_the_latest_are_kept(made_up) -> None:
    from flashbench.kernels import _flash_v3 as flash
    from flashbench.kernels import _hopper_ready as ready

    launches = []
    for _ in range(ready.KEPT + 1):
        q, k, v = (x.detach() for x in inputs(rows=31))
        launches.append(flash.forward_launch(q, k, v, causal=False, scale=1.0)[2])
    for launch in launches:
        launch.run()
    made = made_up.driver.described
    for launch in launches[1:]:
        assert made_up.start(launch)
    assert made_up.driver.described == made, "all but the first"
    assert made_up.start(launches[0])
    assert made_up.driver.described == made + 4


@case
def who_follows_launches_is_told_of_them_by_triton(made_up) -> None:
    from triton import knobs

    leaves = inputs()
    gradients(leaves)
    assert {hooks for _, hooks, _ in made_up.driver.launched[::2]} == {(None, None, None)}
    made_up.driver.launched.clear()
    told = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(told)
    try:
        gradients(leaves)
    finally:
        knobs.runtime.launch_enter_hook.remove(told)
    launched = made_up.driver.launched
    assert len(launched) == 8
    assert all(hooks[0] is not None for _, hooks, _ in launched), "twice by Triton"


@case
def the_launcher_is_tritons_own_but_for_making_descriptors(made_up) -> None:
    """In C the same source, which is built once, or the same signature."""
    from flashbench.kernels import _hopper_ready as ready

    gradients(inputs((192, 128)))
    for launch in made_up.compared:
        compiled, sources = launch.compile(), len(made_up.driver.sources)
        ranks = tuple(0 if box is None else len(box.shape) for box in launch.ready.boxes)
        own = ready._launcher.__wrapped__(compiled, ranks)
        assert len(made_up.driver.sources) == sources
        assert type(own) is type(compiled.run)
        assert (own is compiled.run) == (not any(ranks))
        alike = [{**vars(x), "launch": None} for x in (own, compiled.run)]
        assert alike[0] == alike[1]


@case
def little_is_left_to_do_in_python(made_up) -> None:
    """Calls of functions, Python's and in C: of a whole backward, and of its launches against Triton's."""
    leaves = inputs((128, 128))
    gradients(leaves)
    launches = made_up.compared[1:]
    assert [launch.name for launch in launches] == ["v3_prepare", "v3_bwd", "v3_convert"]
    made_up.driver.deaf = True
    for launch in launches:
        made_up.start(launch)
    ours = calls(lambda: [made_up.start(launch) for launch in launches])
    tritons = calls(lambda: [launch.described().start() for launch in launches])
    print("calls of functions for the launches of a backward:", ours, "in place of", tritons, file=sys.stderr)
    assert ours * 4 < tritons


@case
def a_call_of_what_was_seen_is_looked_up_and_launched(made_up) -> None:
    """Calls of functions, Python's and in C: of a forward by the kernel's own function and by the public one,
    which has few more and leaves torch's dispatcher out."""
    import flashbench
    from flashbench.kernels import _flash_v3 as flash
    from flashbench.kernels import _op

    q, k, v = (x.detach() for x in inputs((128, 128)))
    _op._v3 = lambda layout, causal: flash.plan(layout, causal, None)  # as on a card
    own = lambda: flash.flash_attention(q, k, v, causal=True, return_lse=True)  # noqa: E731
    public = lambda: flashbench.attention(q, k, v, causal=True, return_lse=True)  # noqa: E731
    own(), public()
    (one, *_), (other, *_) = made_up.driver.launched[::2]
    assert one == other, "grid, stream and kernel"
    launch, counted = made_up.compared[0], dict[str, int]()
    with made_up.alone():
        for name, call in (("own", own), ("public", public), ("launch", lambda: made_up.start(launch))):
            counted[name] = min(calls(call) for _ in range(100))  # o may lie elsewhere
    print("calls of functions of a forward:", counted, file=sys.stderr)
    assert counted["own"] <= counted["launch"] + 25
    assert counted["public"] <= counted["own"] + 25


def calls(function: Callable[[], object]) -> int:
    found = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", CASES)
def test_with_a_driver_that_is_made_up(name: str, said: dict[str, str]) -> None:
    assert said[name] == ""


class MadeUp:
    """driver: Triton's, made up; compared: launches, each made twice, by Triton the second time."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.compared: list[Any] = []

    @contextmanager
    def comparing(self) -> Iterator[None]:
        from flashbench.kernels._hopper_ready import Ready

        plain = self.plain = Ready.start

        def both(ready: Any, tensors: Any, scales: Any) -> bool:
            before = len(self.driver.launched)
            launch = ready.launch(tensors, *scales)
            if not plain(ready, tensors, scales):
                launch.described().start()
            launch.described().start()
            (head, _, args), (own_head, _, own_args) = self.driver.launched[before:]
            assert head == own_head, launch.name
            assert args == own_args, launch.name
            lies_as_told(launch)
            self.compared.append(launch)
            return True

        Ready.start = both
        try:
            yield
        finally:
            Ready.start = plain

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing is launched by Triton or noted beside."""
        from flashbench.kernels._hopper_ready import Ready

        comparing, Ready.start, self.driver.deaf = Ready.start, self.plain, True
        try:
            yield
        finally:
            Ready.start, self.driver.deaf = comparing, False

    def start(self, launch: Any) -> bool:
        """Once, not by Triton."""
        started: bool = self.plain(launch.ready, launch.tensors, launch.scales)
        return started

    def doubled(self, launches: tuple[Any, ...]) -> list[Any]:
        return [launch for launch in launches for _ in range(2)]


def lies_as_told(launch: Any) -> None:
    """What the launch says of its tensors, in descriptors or as arguments, is so."""
    named = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    for x, box in zip(launch.args, launch.ready.boxes, strict=False):
        if box is not None and len(box.shape) == 4:
            assert list(x.shape) == box.shape, launch.name
            assert all(
                n == 1 or told == own for n, told, own in zip(x.shape, box.strides, x.stride(), strict=True)
            ), launch.name
    for name in ("o", "do", "dq"):
        for at, axis in enumerate("bhn"):
            if f"{name}_{axis}" in named:
                assert named[f"{name}_{axis}"] == named[name.upper()].stride(at), launch.name


def main() -> None:
    """Prints what went wrong, by case, as JSON."""
    import launching

    found = {}
    for name, function in CASES.items():
        made_up = MadeUp(launching.Driver())
        launching.start_anew(made_up.driver)
        try:
            with made_up.comparing():
                function(made_up)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-3000:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
