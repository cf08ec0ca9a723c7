"""A cell's need is its inputs, what is kept, and the peak of its call or its check."""

from __future__ import annotations

import pytest
from attention import problem

from flashbench import iomodel, kernels, plan
from flashbench.kernels import Implementation, Target
from flashbench.problem import Cell

CPU = Target()
H100 = Target(device="cuda:0", name="NVIDIA H100 80GB HBM3", capability=(9, 0), total_bytes=80 * 10**9)


def long(**changes):
    return problem(
        **{
            "batch": 1, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 65536, "seqlen_k": 65536,
            "head_dim": 128, "head_dim_v": 128, "dtype": "bf16", "causal": False, **changes,
        }
    )  # fmt: skip


def cell(name: str, p, pass_: str = "fwd") -> Cell:
    return Cell(implementation=name, problem=p, pass_=pass_)


def test_naive_at_64k_needs_two_score_matrices() -> None:
    scores, tensor = 16 * 65536**2 * 2, 16 * 65536 * 128 * 2
    needs = plan.needs_bytes(cell("naive", long()), H100)
    assert 2 * scores == 274_877_906_944
    assert 2 * scores + 4 * tensor <= needs <= 2 * scores + 5 * tensor


def test_the_causal_mask_counts_once_for_all_heads() -> None:
    full, causal = (plan.needs_bytes(cell("naive", long(causal=c)), H100) for c in (False, True))
    assert causal - full == 65536**2


@pytest.mark.parametrize("name", ["naive", "sdpa-flash"])
def test_a_backward_needs_what_the_forward_saved_and_dout(name: str) -> None:
    p = long(seqlen_q=2048, seqlen_k=2048, batch=8)
    model = kernels.get(name).io_model
    assert model
    forward, backward = (iomodel.estimate(model, p, pass_) for pass_ in ("fwd", "bwd"))
    tensor = 8 * 16 * 2048 * 128 * 2
    expected = 4 * tensor + tensor + forward.saved_bytes + backward.extra_bytes
    check = 4 * tensor + plan.CHECK_BYTES["cuda"]
    assert plan.needs_bytes(cell(name, p, "bwd"), H100) == max(expected, check)
    assert plan.needs_bytes(cell(name, p, "fwd+bwd"), H100) == max(expected, check)


def test_inputs_are_q_k_v_and_for_a_backward_dout() -> None:
    p = problem(num_kv_heads=1, head_dim_v=12, seqlen_k=20)
    q, k, v, dout = 2 * 4 * 16 * 8 * 4, 2 * 20 * 8 * 4, 2 * 20 * 12 * 4, 2 * 4 * 16 * 12 * 4
    assert plan.input_bytes(p, "fwd") == q + k + v
    assert plan.input_bytes(p, "bwd") == plan.input_bytes(p, "fwd+bwd") == q + k + v + dout
    assert plan.resident_bytes(p) == q + k + v + dout


def test_every_cell_is_planned_in_order_and_a_refusal_costs_nothing() -> None:
    cells = [cell(name, problem()) for name in ("sdpa", "sdpa-cudnn", "naive")]
    planned = plan.plan(cells, CPU)
    assert [row.cell for row in planned] == cells
    assert planned[1].note == "torch's cudnn backend needs a GPU"
    assert (planned[1].needs_bytes, planned[1].expected_s) == (0, 0.0)
    assert all(row.needs_bytes > 0 and row.expected_s > 0 for row in (planned[0], planned[2]))


def test_the_check_of_a_problem_is_paid_once() -> None:
    p = long(seqlen_q=16384, seqlen_k=16384)
    first, second = plan.plan([cell("naive", p, "bwd"), cell("naive", p, "bwd")], H100)
    assert first.expected_s > second.expected_s


def test_expected_time_grows_with_the_work_and_is_less_without_timing() -> None:
    lengths = [1024, 4096, 16384]
    cells = [cell("naive", long(seqlen_q=n, seqlen_k=n)) for n in lengths]
    times = [row.expected_s for row in plan.plan(cells, H100)]
    assert times == sorted(times)
    untimed = [row.expected_s for row in plan.plan(cells, H100, timed=False)]
    assert all(less < more for less, more in zip(untimed, times, strict=True))
    metered = [row.expected_s for row in plan.plan(cells, H100, energy=True)]
    assert metered == pytest.approx([time + plan.ENERGY_S for time in times])
    heated = [row.expected_s for row in plan.plan(cells, H100, load="sustained")]
    assert heated == pytest.approx([time + 0.9 for time in times])  # 0.3 s before each of three rounds


def test_cells_that_are_kept_ready_together_need_what_each_keeps_and_the_largest_call() -> None:
    p = long(seqlen_q=4096, seqlen_k=4096)
    cells = [cell("naive", p, "bwd"), cell("flash-v2", p, "bwd")]
    naive, flash = (plan.needs_bytes(one, H100) for one in cells)
    both = plan.together_bytes(cells, H100)
    # what flash keeps: o, and what its forward saves, which is o and the log-sum-exp
    rows = p.batch * p.num_heads * p.seqlen_q
    assert both - naive == 2 * rows * p.head_dim_v * p.dtype_bytes + rows * 4
    assert both == plan.together_bytes(cells[::-1], H100) > naive > flash
    assert plan.together_bytes(cells[:1], H100) == naive


def test_an_interpreted_implementation_is_expected_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Implementation(
        name="slow", summary="", prepare=lambda *_: lambda: None, io_model=None, interpreted=lambda _: True
    )
    monkeypatch.setattr(kernels, "registry", lambda: {"slow": slow})
    p = problem(seqlen_q=256, seqlen_k=256)
    [planned] = plan.plan([cell("slow", p)], CPU)
    assert planned.expected_s > iomodel.flops(p, "fwd") / 1e9
