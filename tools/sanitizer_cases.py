"""Small problems that together launch every bundled kernel, and broken kernels that each sanitizer must find.

Shapes are ragged, of several tiles where a tile is small, with grouped heads; tensors are made on the CPU, so
that few of torch's own kernels run under the sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flashbench import kernels
from flashbench.problem import Cell, Problem, packed

HOPPER = (9, 0), 232448
"""Compute capability and shared memory per block, to tell what would be launched without a card."""
SHAPE: Mapping[str, Any] = {
    "batch": 2, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 150, "seqlen_k": 277, "head_dim": 64,
    "head_dim_v": 64, "dtype": "fp16", "causal": True,
}  # fmt: skip
LENGTHS = ((70, 133), (0, 9), (33, 0), (1, 65), (150, 150))


@dataclass(frozen=True)
class Case:
    """One thing to run. run(device): launches it once; on ``meta`` under a rehearsal only says what.

    cell: what can be compiled before, of those that have it.
    """

    group: str
    name: str
    run: Callable[[str], object]
    cell: Cell | None = None


def problem(**changes: Any) -> Problem:
    """The small problem with changes; ``lengths``: a packed batch."""
    lengths = changes.pop("lengths", ())
    if "head_dim" in changes:
        changes.setdefault("head_dim_v", changes["head_dim"])
    found = Problem(**{**SHAPE, **changes})
    return packed(found, lengths) if lengths else found


def attention(group: str, implementation: str, pass_: str, **changes: Any) -> Case:
    p = problem(**changes)

    def run(device: str) -> object:
        import torch

        inputs = tensors(p, device).detached(grad=pass_ != "fwd")
        row = kernels.get(implementation)
        with torch.set_grad_enabled(pass_ != "fwd"):
            if pass_ == "fwd":
                assert row.prepare_lse is not None
                return row.prepare_lse(p, inputs, {})()
            o = row.prepare(p, inputs)()
            if group in (V3, WIDE) and device != "meta":
                write_anew(o, p)
            return torch.autograd.grad(o, inputs.leaves, inputs.dout)

    cell = Cell(implementation=implementation, problem=p, pass_=pass_)
    return Case(group, cell.key, run, cell)


def write_anew(o: Any, p: Problem) -> None:
    """Give o what naive makes of the same inputs: initcheck does not see that TMA has written it."""
    import torch

    with torch.no_grad():
        found = kernels.get("naive").prepare(p, tensors(p, "cpu"))()
        o.data.copy_(torch.empty_strided(o.shape, o.stride(), dtype=o.dtype).copy_(found))


def tensors(p: Problem, device: str) -> Any:
    """The inputs of a problem, made on the CPU and copied."""
    from flashbench.kernels import _inputs

    if device == "meta":
        return _inputs.make_inputs(p, device, 0)
    made = _inputs.make_inputs(replace(p, block_mask=""), "cpu", 0)
    moved = {f.name: getattr(made, f.name) for f in fields(made)}
    moved = {name: x.to(device) if hasattr(x, "to") else x for name, x in moved.items()}
    return replace(made, **moved | {"block_mask": _inputs.block_mask(p, device)})


def decode(name: str, *, page: int = 0, fp8: bool = False, splits: int = 3, **changes: Any) -> Case:
    """Append two keys to a cache and decode over it."""
    p = problem(**{"seqlen_q": 2, "seqlen_k": 277, "batch": 3, **changes})

    def run(device: str) -> object:
        import torch

        from flashbench.kernels import _triton

        flash = _triton.load("cuda" if device == "meta" else device.split(":")[0], "_flash_decode")
        q, cache, new = _cached(flash, p, page, fp8)
        q, new = q.to(device), [x.to(device) for x in new]
        moved = {f.name: getattr(cache, f.name) for f in fields(cache)}
        moved = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in moved.items()}
        cache = replace(cache, **moved)
        how = flash.Call(
            causal=p.causal, scale=p.softmax_scale, num_splits=splits,
            card=(*HOPPER, 132) if device == "meta" else None,
        )  # fmt: skip
        flash.append(cache, *new)
        return flash.run(q, cache, how)

    return Case("flash-decode", f"{name} {p.key} page{page} splits{splits}{' fp8 cache' * fp8}", run)


def _cached(flash: Any, p: Problem, page: int, fp8: bool) -> tuple[Any, Any, list[Any]]:
    """q, a cache on the CPU whose pages are out of order, and new keys and values."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[p.dtype]
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=made).to(dtype)

    pages = -(-p.seqlen_k // page) if page else 0
    shape = (p.batch * pages, page, p.num_kv_heads) if page else (p.batch, p.num_kv_heads, p.seqlen_k)
    k, v = normal(*shape, p.head_dim), normal(*shape, p.head_dim_v)
    table = None
    if page:
        order = torch.randperm(p.batch * pages, generator=made).to(torch.int32)
        table = order.view(p.batch, pages).contiguous()
    one = torch.ones(1) if fp8 else None
    if fp8:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    used = torch.tensor([p.seqlen_k - 2, 1, 100][: p.batch], dtype=torch.int32)
    cache = flash.Cache(k=k, v=v, seqused_k=used, block_table=table, k_descale=one, v_descale=one)
    new = [normal(p.batch, p.num_kv_heads, 2, dim) for dim in (p.head_dim, p.head_dim_v)]
    return normal(p.batch, p.num_heads, p.seqlen_q, p.head_dim), cache, new


def _probes(device: str) -> object:
    import torch

    from flashbench.kernels import _call, _triton

    probes = _triton.load("cuda" if device == "meta" else device.split(":")[0], "_probes")
    out = torch.empty(4, device=device)
    x = torch.ones(8 * probes.READ_BLOCK).to(device)
    block = {"BLOCK": probes.READ_BLOCK, "UNROLL": 2}
    _call.Launch("read", probes.read, 4, (x, out, 8, 2), block).run()
    many = {"BLOCK": probes.EXP_BLOCK, "UNROLL": probes.EXP_UNROLL}
    _call.Launch("exp2", probes.exp2, 4, (out, 2), many).run()
    return out


def _rounding(device: str) -> object:
    import torch

    from flashbench.kernels import _triton

    rounding = _triton.load("cuda" if device == "meta" else device.split(":")[0], "_fp8_rounding")
    x, fp8 = torch.randn(2, 2, 277, 80).to(device), torch.float8_e4m3fn
    return rounding.quantise(x, fp8, 128), rounding.interleaved(x, fp8, 128), rounding.centred(x, fp8, 128)


V2, V3, WIDE, FP8 = "flash-v2", "flash-v3", "flash-v3 wide", "fp8"
CASES: tuple[Case, ...] = (
    attention(V2, "flash-v2", "bwd"),
    attention(V2, "flash-v2", "bwd", head_dim=40, dtype="bf16", causal=False),
    attention(V2, "flash-v2", "bwd", head_dim=24, head_dim_v=72, dtype="fp32"),
    attention(V2, "flash-v2", "bwd", head_dim=128, dtype="tf32", layout="bshd"),
    attention("flash-v2 options", "flash-v2", "bwd", window=(40, 9), causal=False, softcap=5.0, alibi=True,
              sinks=True, bias="bhqk"),
    attention("flash-v2 options", "flash-v2", "bwd", bias="b11k", dropout_p=0.2, alignment="top-left"),
    attention("flash-v2 options", "flash-v2", "bwd", bias="1hq1", sinks=True, dtype="fp32", head_dim=32),
    attention("flash-v2 options", "flash-v2", "bwd", block_mask="document", deterministic=True),
    attention("flash-v2 options", "flash-v2", "bwd", block_mask="random:0.5", causal=False, seqlen_q=300),
    attention("flash-v2 packed", "flash-v2", "bwd", lengths=LENGTHS),
    attention("flash-v2 packed", "flash-v2", "bwd", lengths=LENGTHS, window=(20, 0), dropout_p=0.1),
    attention("flash-v2 packed", "flash-v2", "bwd", seqlen_q=277, seqlen_k=150),
    attention("flash-v2 packed", "flash-v2", "bwd", head_dim=256, dtype="bf16"),
    attention("flash-v1", "flash-v1", "bwd"),
    attention("flash-v1", "flash-v1", "bwd", head_dim=24, dtype="fp32", causal=False),
    attention("flash-v2-atomic", "flash-v2-atomic", "bwd"),
    attention("flash-v2-atomic", "flash-v2-atomic", "bwd", head_dim=40, dtype="bf16", causal=False),
    attention("flash-v2-atomic", "flash-v2-atomic", "bwd", head_dim=32, dtype="fp32"),
    attention(V3, "flash-v3", "bwd"),
    attention(V3, "flash-v3", "bwd", head_dim=128, dtype="bf16", causal=False),
    attention(V3, "flash-v3", "bwd", head_dim=96, deterministic=True),
    attention(V3, "flash-v3", "bwd", seqlen_q=277, seqlen_k=150, head_dim=80, layout="bshd"),
    attention(V3, "flash-v3", "fwd", seqlen_q=200, seqlen_k=1300),
    attention(V3, "flash-v3", "fwd", seqlen_q=200, seqlen_k=420, dtype="bf16", causal=False),
    attention(V3, "flash-v3", "fwd", seqlen_q=150, seqlen_k=1300, head_dim=128, dtype="bf16"),
    attention(V3, "flash-v3", "fwd", seqlen_q=150, seqlen_k=900, head_dim=128, causal=False),
    attention(WIDE, "flash-v3", "bwd", head_dim=256),
    attention(WIDE, "flash-v3", "bwd", head_dim=192, head_dim_v=128, dtype="bf16", causal=False),
    attention(FP8, "flash-v2-fp8", "fwd", dtype="fp8", fp8_scale="block"),
    attention(FP8, "flash-v2-fp8", "fwd", dtype="fp8-e5m2", head_dim=40, causal=False),
    attention(FP8, "flash-v3-fp8", "fwd", dtype="fp8", fp8_scale="block", hadamard=True),
    attention(FP8, "flash-v3-fp8", "fwd", dtype="fp8", head_dim=128, causal=False),
    attention(FP8, "flash-v3-fp8", "fwd", dtype="fp8-e5m2", head_dim=96),
    attention(
        FP8, "flash-v3-fp8", "fwd", dtype="fp8", fp8_scale="block", head_dim=128, seqlen_q=150, seqlen_k=4200
    ),
    Case(FP8, "rounding to fp8", _rounding),
    decode("contiguous"),
    decode("paged", page=16, dtype="bf16"),
    decode("one split", splits=1, head_dim=128, page=24),
    decode("fp8", fp8=True),
    decode("paged fp8", page=32, fp8=True, head_dim=128),
    decode("fp32", dtype="fp32", head_dim=40),
    Case("probes", "calibrate's probes", _probes),
)  # fmt: skip
"""What runs under each sanitizer, by group; a group is one process."""


def cells(groups: Collection[str]) -> list[Cell]:
    """What of the groups can be compiled in parallel, both passes where there are two."""
    found = [one.cell for one in CASES if one.group in groups and one.cell is not None]
    return [replace(cell, pass_="fwd+bwd" if cell.pass_ == "bwd" else "fwd") for cell in found]


def launched(case: Case) -> list[str]:
    """The kernels that a case launches on Hopper, as MODULE.FUNCTION; no card is needed."""
    from flashbench.kernels import _triton

    _triton.load("cuda", "_flash_v2")
    from flashbench.kernels import _call

    with _call.rehearsed(HOPPER) as launches:
        case.run("meta")
    return list(dict.fromkeys(named(one.kernel) for one in launches))


def named(kernel: Any) -> str:
    """MODULE.FUNCTION of a kernel."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def entries() -> set[str]:
    """Every bundled kernel that is launched: those of Triton's functions that no other one calls."""
    import importlib
    import pkgutil

    from flashbench.kernels import _triton

    _triton.load("cuda", "_flash_v2")
    from triton.runtime.jit import JITFunction

    functions: dict[int, Any] = {}
    called: set[int] = set()
    for one in pkgutil.iter_modules(kernels.__path__):
        if one.name.startswith("_") and (one.name.endswith(("_kernels", "_probes")) or "hopper" in one.name):
            module = importlib.import_module(f"{kernels.__name__}.{one.name}")
            found = [x for x in vars(module).values() if isinstance(x, JITFunction)]
            functions |= {id(x): x for x in found if x.fn.__module__ == module.__name__}
    for function in functions.values():
        called |= {id(x) for x in _called(function.fn) if x is not function}
    return {named(x) for key, x in functions.items() if key not in called}


def _called(function: Any) -> list[Any]:
    """What the names in a function may stand for."""
    names, scope = function.__code__.co_names, function.__globals__
    direct = [scope[name] for name in names if name in scope]
    modules = [x for x in direct if type(x).__name__ == "module"]
    return direct + [getattr(x, name) for x in modules for name in names if hasattr(x, name)]
