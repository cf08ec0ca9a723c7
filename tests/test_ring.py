"""Attention across cards: zigzag, bytes over the link, every algorithm against fp64, in threads and Gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_threads import run as in_threads
from tiers import tiers

from flashbench import devices, environment, links, runfile, table, units
from flashbench._iomodel import across, shards
from flashbench.cli import main
from flashbench.errors import SpecError, UnknownName
from flashbench.isolation import death, limit
from flashbench.kernels import Target, _local, merge
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference
from flashbench.problem import Cell, Problem
from flashbench.report import across as across_page
from flashbench.report import tabled, words
from flashbench.report.data import Results
from flashbench.report.sections import SECTIONS
from flashbench.ring import group, measuring, ring_attention, rows
from flashbench.ring.group import Group, RankLost

PROBLEM = Problem(
    batch=2, num_heads=4, num_kv_heads=2, seqlen_q=61, seqlen_k=61, head_dim=16, head_dim_v=24, dtype="fp32",
    causal=True,
)  # fmt: skip
H100 = devices.find("h100-sxm")
ROOT = Path(__file__).resolve().parent.parent
ON_TWO = ROOT / "reports" / "h200-sxm-x2" / "ring"


def flashbench(*line: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(line))
    return int(str(ended.value.code or 0))


# --- shards


@given(ranks=st.integers(1, 9), more=st.integers(0, 300), zigzag=st.booleans())
def test_every_row_is_in_one_shard(ranks: int, more: int, zigzag: bool) -> None:
    count = 2 * ranks + more
    cut = shards.shards(count, ranks, zigzag=zigzag)
    held = sorted(row for shard in cut for start, stop in shard for row in range(start, stop))
    assert held == list(range(count))
    sizes = [shards.length(shard) for shard in cut]
    assert max(sizes) - min(sizes) <= 1 + zigzag
    assert all(list(shard) == sorted(shard) for shard in cut)


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(1, 5), more=st.integers(0, 20), causal=st.booleans())
def test_blocks_are_what_the_mask_shows(ranks: int, more: int, causal: bool) -> None:
    """Pair by pair: the blocks of all steps cover each visible pair once and no other."""
    count = 2 * ranks + more
    cut = shards.shards(count, ranks, zigzag=causal)
    numbers = [[row for start, stop in shard for row in range(start, stop)] for shard in cut]
    met = torch.zeros(count, count, dtype=torch.int64)
    for mine, theirs in product(range(ranks), repeat=2):
        step = shards.block(cut[mine], cut[theirs], causal=causal)
        queries, keys = numbers[mine][slice(*step.rows)], numbers[theirs][slice(*step.keys)]
        seen = [
            (i, j)
            for row, i in enumerate(queries)
            for column, j in enumerate(keys)
            if not step.causal or column <= row + len(keys) - len(queries)
        ]
        assert len(seen) == shards.pairs(step)
        for i, j in seen:
            met[i, j] += 1
    visible = torch.ones(count, count, dtype=torch.int64)
    assert torch.equal(met, visible.tril() if causal else visible)


def test_a_causal_zigzag_is_balanced_in_every_step() -> None:
    cut = shards.shards(4096, 4, zigzag=True)
    steps = {
        shards.pairs(shards.block(mine, theirs, causal=True))
        for mine in cut
        for theirs in cut
        if mine != theirs
    }
    assert steps == {1024 * 1024 // 2}
    plain = shards.shards(4096, 4, zigzag=False)  # in whose last shard nearly half of the pairs are
    assert across.share("ring", replace(PROBLEM, seqlen_q=4096, seqlen_k=4096), 4) == pytest.approx(0.25)
    ragged = replace(PROBLEM, seqlen_q=37, seqlen_k=37)
    odd = across.shards_of("ring", ragged, 3)
    most = max(sum(shards.pairs(shards.block(mine, other, causal=True)) for other in odd) for mine in odd)
    assert across.share("ring", ragged, 3) == pytest.approx(most / (37 * 38 / 2))
    assert sum(start for ((start, _),) in plain) > 0


# --- bytes and times of the model


def test_bytes_by_hand() -> None:
    p = replace(PROBLEM, batch=1, num_heads=8, num_kv_heads=8, seqlen_q=1024, seqlen_k=1024, dtype="bf16")
    kv = 256 * 8 * 2  # bytes of a shard on 4 ranks, per column
    assert across.sent("ring", p, "fwd", 4)[0] == {"k": 3 * kv * 16, "v": 3 * kv * 24}
    assert across.sent("ring", p, "bwd", 4)[0] == {
        "k": 3 * kv * 16, "v": 3 * kv * 24, "dk": 3 * 2 * kv * 16, "dv": 3 * 2 * kv * 24,
    }  # fmt: skip
    assert across.sent("allgather", p, "bwd", 4) == across.sent("ring", p, "bwd", 4)
    # three quarters of the own rows of q, k, v go, three quarters of the rows of the own heads' o come back
    quarter = 256 * 2 * 2
    assert across.sent("ulysses", p, "fwd", 4)[0] == {
        "q": 3 * quarter * 16, "k": 3 * quarter * 16, "v": 3 * quarter * 24, "o": 3 * quarter * 24,
    }  # fmt: skip
    total = across.across("ring", p, "fwd+bwd", ranks=4).total_bytes
    assert total == sum(across.across("ring", p, kind, ranks=4).total_bytes for kind in ("fwd", "bwd"))
    assert across.across("ring", p, "fwd", ranks=1).total_bytes == 0


@given(ranks=st.integers(1, 9), more=st.integers(0, 40), backward=st.booleans(), causal=st.booleans())
def test_ranks_of_a_kind_send_alike(ranks: int, more: int, backward: bool, causal: bool) -> None:
    count, pass_ = 2 * ranks + more, "fwd+bwd" if backward else "fwd"
    p = replace(PROBLEM, num_heads=ranks, num_kv_heads=ranks, seqlen_q=count, seqlen_k=count, causal=causal)
    for name in across.ALGORITHMS:
        every = across.sent(name, p, pass_, ranks)
        most = max(sum(found.values()) for found in every)
        assert sum(across.most_sent(name, p, pass_, ranks).values()) == most


def test_gqa_makes_a_ring_cheap_and_ulysses_less_so() -> None:
    p = replace(
        PROBLEM, num_heads=32, num_kv_heads=4, seqlen_q=4096, seqlen_k=4096, head_dim_v=16, dtype="bf16"
    )
    ring, ulysses = (across.across(name, p, "fwd", ranks=4).total_bytes for name in ("ring", "ulysses"))
    whole = replace(p, num_kv_heads=32)
    assert across.across("ring", whole, "fwd", ranks=4).total_bytes == 8 * ring
    assert ring < ulysses < across.across("ring", whole, "fwd", ranks=4).total_bytes


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_ring_hides_its_hops_from_the_length_on_that_it_names(pass_: str) -> None:
    p = replace(PROBLEM, batch=1, seqlen_q=65536, seqlen_k=65536, head_dim=128, head_dim_v=128, dtype="bf16")

    def at(count: int) -> across.Across:
        there = replace(p, seqlen_q=count, seqlen_k=count)
        return across.across("ring", there, pass_, ranks=4, device=H100, link="network")

    named = at(65536).hidden_from
    assert named
    assert at(2 * named).hidden
    assert not at(named // 2).hidden
    long = at(2**20)
    assert long.efficiency is not None
    assert 0.9 < long.efficiency <= 1
    assert at(4096).time_s >= 0.999 * at(4096).link_s  # type: ignore[operator]
    slow, fast = (
        across.across("ring", p, pass_, ranks=4, device=H100, link=name) for name in ("pcie", "nvlink")
    )
    assert slow.link_s > fast.link_s  # type: ignore[operator]


def test_every_card_has_links_with_a_source() -> None:
    assert set(links.LINKS) == {row.name for row in devices.DEVICES}
    for row in links.LINKS.values():
        assert row.source
        assert row.rate(row.fastest) > 1e9
    with pytest.raises(SpecError, match="accepted: pcie"):
        links.of("l4").rate("nvlink")
    with pytest.raises(SpecError, match="mine"):
        links.of("mine")


def test_links_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert flashbench("list", "devices", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["h100-sxm"]["nvlink_bytes_per_s"] == 450e9
    assert rows["l4"]["nvlink_bytes_per_s"] is None
    assert "DGX H100" in rows["h200"]["links_source"]


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    ragged = replace(PROBLEM, num_heads=6, num_kv_heads=3)
    assert "6 query heads" in (across.why_unsupported("ulysses", ragged, 4) or "")
    assert "neither divides" in (across.why_unsupported("ulysses", ragged, 2) or "")
    assert "rows cannot be cut" in (across.why_unsupported("ring", PROBLEM, 31) or "")
    assert "window" in (across.why_unsupported("ring", replace(PROBLEM, window=(4, 0)), 2) or "")
    assert "cut alike" in (across.why_unsupported("ring", replace(PROBLEM, seqlen_k=62), 2) or "")
    with pytest.raises(SpecError, match="6 query heads"):
        across.sent("ulysses", ragged, "fwd", 4)
    with pytest.raises(UnknownName):
        across.sent("rings", PROBLEM, "fwd", 2)


# --- the local step


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_merge_to_the_whole_and_their_gradients_add_up(causal: bool) -> None:
    """By torch and by the bundled kernels: first keys, then the rest, of which the first row sees one."""
    p = replace(PROBLEM, batch=1, seqlen_q=24, seqlen_k=40, causal=causal)
    inputs = make_inputs(p, "cpu", 0)
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.dout
    halves = ((slice(0, 16), False), (slice(16, None), causal))
    parts = [
        _local.forward(q, k[:, :, keys], v[:, :, keys], causal=mask, scale=p.softmax_scale)
        for keys, mask in halves
    ]
    o, lse = merge(*zip(*parts, strict=True))
    for step in (_local.backward, by_kernels):
        found = [
            step((q, k[:, :, keys], v[:, :, keys], o, lse, do), causal=mask, scale=p.softmax_scale)
            for keys, mask in halves
        ]
        dq = found[0][0] + found[1][0]
        dk, dv = (torch.cat([part[i] for part in found], dim=2) for i in (1, 2))
        accuracy = Reference(p, inputs).compare(o, (dq, dk, dv), lse)
        assert accuracy.ok, accuracy


def by_kernels(tensors: tuple[torch.Tensor, ...], *, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    return _local.by_kernels(tensors, causal, scale)


# --- algorithms


def cases(ranks: int) -> Iterator[tuple[str, Problem]]:
    for name, causal, (heads, kv_heads), count in product(
        across.ALGORITHMS, (False, True), ((4, 4), (4, 2), (4, 1)), (61, 64)
    ):
        p = replace(
            PROBLEM, causal=causal, num_heads=heads, num_kv_heads=kv_heads, seqlen_q=count, seqlen_k=count
        )
        if across.why_unsupported(name, p, ranks) is None:
            yield name, p


@pytest.mark.parametrize("ranks", tiers([1, 3], [2, 4, 5, 7]))
def test_any_number_of_ranks_in_threads(ranks: int) -> None:
    for name, p in cases(ranks):
        inputs = make_inputs(p, "cpu", 1)
        (o, *grads), sent = in_threads(name, p, inputs, ranks)
        accuracy = Reference(p, inputs).compare(o, grads)
        assert accuracy.ok, (name, p.key, accuracy)
        for number, kind in enumerate(("fwd", "bwd")):
            expected = [sum(found.values()) for found in across.sent(name, p, kind, ranks)]
            assert [both[number] for both in sent] == expected, (name, p.key, kind)


def test_a_merge_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(PROBLEM, "cpu", 1)
    monkeypatch.setattr(ring_attention.Merged, "add", lambda *_: None)
    (o, *_), _ = in_threads("ring", PROBLEM, inputs, 2)
    assert not Reference(PROBLEM, inputs).compare(o).ok


def over_gloo(ranks: int, most: int | None = None) -> None:
    """most: of the cells, spread over all of them."""
    cells = [
        Cell(implementation=name, problem=replace(p, dtype=dtype), pass_="fwd+bwd")
        for number, (name, p) in enumerate(cases(ranks))
        for dtype in (("fp32",) if number % 3 else ("fp32", "bf16", "fp16"))
    ]
    assert len(cells) > 30
    cells = cells if most is None else cells[:: -(-len(cells) // most)]
    found = list(rows.measured(cells, rows.Asked(ranks=ranks, device_type="cpu", timed=False), rows.Target()))
    assert len(found) == len(cells)
    for cell, row in zip(cells, found, strict=True):
        assert row["status"] == "ok", row
        assert set(row["max_abs_error"]) == {"o", "dq", "dk", "dv"}
        assert all(error <= row["budget"][name] for name, error in row["max_abs_error"].items())
        sent = across.sent(cell.implementation, cell.problem, "fwd+bwd", ranks)
        assert row["sent_by_rank"] == [sum(one.values()) for one in sent]


def test_two_ranks_over_gloo() -> None:
    over_gloo(2)


@pytest.mark.slow
@pytest.mark.parametrize("most", [16, None])
def test_four_ranks_over_gloo(most: int | None) -> None:
    over_gloo(4, most)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_cards_over_nccl(dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    p = replace(PROBLEM, seqlen_q=1500, seqlen_k=1500, head_dim=128, head_dim_v=128, dtype=dtype)
    cells = [
        Cell(implementation=name, problem=replace(p, causal=causal), pass_="fwd+bwd")
        for name in across.ALGORITHMS
        for causal in (False, True)
    ]
    asked = rows.Asked(ranks=2, device_type="cuda", timed=True)
    for row in rows.measured(cells, asked, environment.target("cuda")):
        assert row["status"] == "ok", row
        assert row["time_s"] > 0


# --- processes


CELL = Cell(implementation="ring", problem=PROBLEM, pass_="fwd")


def ranks_alive() -> list[str]:
    done = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
    mine = str(os.getpid())
    return [
        line for line in done.stdout.splitlines() if "flashbench.ring.rank" in line and mine in line.split()
    ]


def test_a_rank_that_dies_ends_all_with_one_line() -> None:
    long = replace(PROBLEM, seqlen_q=6000, seqlen_k=6000)
    with group.Group(2, "cpu", seed=0, limit_s=60) as ranks:
        ranks.run(CELL, timed=True)
        victim = ranks._workers[1].pid
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(group.RankLost, match=r"^rank 1 of 2: .*SIGKILL$"):
            ranks.run(replace(CELL, problem=long), timed=True)
    assert not ranks_alive()


class Heard:
    """A rank's worker, as far as a group listens to it: what it does each time, the last again and again."""

    def __init__(self, *does: Callable[[], Any]) -> None:
        self.does = list(does)

    def receive(self, _: float) -> Any:
        return (self.does.pop(0) if len(self.does) > 1 else self.does[0])()

    def ask(self) -> None:
        return

    kill = ask


def test_who_died_is_told_by_a_parent_that_was_held_up_when_another_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def raises() -> dict[str, str]:
        return {"raised": "RuntimeError: Connection closed by peer"}

    def silent() -> None:
        now[0] += 10.0  # in which the parent did not run
        raise death.Silent

    def died() -> None:
        raise death.Ended(code=-9)

    monkeypatch.setattr(limit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    two = object.__new__(Group)
    two._workers = [Heard(raises), Heard(silent, silent, died)]  # type: ignore[list-item]
    two._folder = SimpleNamespace(cleanup=lambda: None)  # type: ignore[assignment]
    with pytest.raises(RankLost, match=r"^rank 1 of 2: its process was killed by SIGKILL$"):
        two._hear(60.0)


def speaking(code: str) -> tuple[str, ...]:
    """A rank that does so once it was told the token with which it speaks."""
    return (sys.executable, "-c", f"import sys, time\ntoken = input()\n{code}\ntime.sleep(60)")


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("", group.RankLost, "no answer in 0.5 s"),
        (
            """print(token + '{"raised": "ValueError: no"}', flush=True)""",
            group.CellFailed,
            r"rank \d of 2: ValueError: no",
        ),
        ("""print(token + '{"ready"', flush=True)""", group.RankLost, r"messages: b'{\"ready\"\\n'"),
        ("""print('{"raised": "no"}', flush=True)""", group.RankLost, r"messages: b'{\"raised\": "),
        ("sys.exit(3)", group.RankLost, "exited with code 3"),
    ],
    ids=["silent", "raises", "babbles", "forges", "exits"],
)
def test_other_ends_of_ranks(
    code: str, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "COMMAND", speaking(code))
    monkeypatch.setattr(group, "START_S", 0.5 if not code else 120.0)
    with pytest.raises(kind, match=said):
        group.Group(2, "cpu", seed=0, limit_s=60)


class Fake:
    """A group that fails as told, cell by cell."""

    def __init__(self, outcomes: list[Exception | None]) -> None:
        self.outcomes, self.made = outcomes, 0

    def __call__(self, *_: object, **__: object) -> Fake:
        self.made += 1
        return self

    def run(self, *_: object, **__: object) -> list[dict[str, object]]:
        outcome = self.outcomes.pop(0)
        if outcome:
            raise outcome
        return [{"sent_bytes": 1}, {"sent_bytes": 2}]

    def close(self) -> None:
        return


def test_a_cell_that_raises_costs_a_group_and_a_lost_rank_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*outcomes: Exception | None) -> tuple[list[str], int, Callable[[], object]]:
        fake = Fake(list(outcomes))
        monkeypatch.setattr(rows, "Group", fake)
        walk = rows.measured([CELL] * 3, rows.Asked(ranks=2, device_type="cpu"), rows.Target())
        statuses = []
        lost = None
        try:
            statuses.extend(row["status"] for row in walk)
        except group.RankLost as error:
            lost = error
        return statuses, fake.made, lost

    assert found(None, group.CellFailed("rank 0 of 2: OutOfMemoryError: …"), None)[:2] == (
        ["ok", "oom", "ok"],
        2,
    )
    statuses, made, lost = found(None, group.RankLost("rank 1 of 2: gone"))
    assert (made, str(lost)) == (1, "rank 1 of 2: gone")
    assert statuses == ["ok", "failed", "skipped"], "a cell that did not run is a row"


def test_overlap_and_efficiency() -> None:
    row = measuring.times([3.0, 2.0, 2.5], [2.0], [1.0], [4.0], 2)
    assert row["overlap"] == pytest.approx(0.5)
    assert row["speedup"] == pytest.approx(1.6)
    assert row["efficiency"] == pytest.approx(0.8)
    assert "overlap" not in measuring.times([1.0], None, None, [], 2)


# --- the command


def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("ring", "--device", "cpu", "--seqlens", "64", "--head-dims", "16", "--heads", "2",
            "--passes", "fwd", "--impls", "ring,torch-cp", "--out", str(tmp_path / "r"),
            "--json", "-q")  # fmt: skip
    assert flashbench(*line) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in shown] == ["ok", "unsupported"]
    kept = runfile.load(tmp_path / "r" / "results.jsonl")
    assert not kept.notes
    assert not runfile.verify(kept.path).damage
    row = kept.ring[0]
    assert row["sent_bytes"] == row["link_bytes"] == 2 * 32 * 2 * 16 * 4
    assert row["time_s"] > 0 < row["one_card_s"]
    assert row["efficiency"] == pytest.approx(row["one_card_s"] / row["time_s"] / 2)
    assert flashbench(*line) == 2
    assert "holds results.jsonl already" in capsys.readouterr().err


def test_a_lost_rank_leaves_a_row_for_every_cell_and_a_kill_is_told_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "Group", Fake([None, group.RankLost("rank 1 of 2: gone")]))
    line = ("ring", "--device", "cpu", "--seqlens", "64", "--passes", "fwd,bwd", "--out", str(tmp_path), "-q")
    assert flashbench(*line) == 5
    assert "rank 1 of 2: gone; 4 of 6 cells were not started" in capsys.readouterr().err
    path = tmp_path / "results.jsonl"
    found = runfile.load(path)
    assert found.header["planned"] == 6
    assert [row["status"] for row in found.ring] == ["ok", "failed", *["skipped"] * 4]
    assert found.ring[-1]["reason"] == "the run ended before it: rank 1 of 2: gone"
    assert runfile.verify(path).missing == 0
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert flashbench("verify", str(path)) == 0
    assert "2 rows of ring, 4 planned cells have none" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [0, 1])
def test_a_ring_that_is_stopped_can_be_run_again_where_it_has_no_row(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Fake):
        def run(self, *what: object, **how: object) -> list[dict[str, object]]:
            if not self.outcomes:
                signal.raise_signal(signal.SIGTERM)
            return super().run(*what, **how)

    line = ("ring", "--device", "cpu", "--seqlens", "64", "--impls", "ring", "--out", str(tmp_path), "-q")
    monkeypatch.setattr(rows, "Group", Stopped([None] * kept))
    assert flashbench(*line) == 130
    assert f"warning: interrupted; {kept} of 2 rows were measured\n" in capsys.readouterr().err
    path = tmp_path / "results.jsonl"
    assert len(runfile.load(path).ring) == kept
    assert runfile.verify(path).missing == 2 - kept
    monkeypatch.setattr(rows, "Group", Fake([None, None]))
    assert flashbench(*line) == (2 if kept else 0)
    assert len(runfile.load(path).ring) == (kept or 2)


def test_cards_of_all_ranks_are_in_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def collect(target: Target) -> dict[str, object]:
        return {
            "host": "here",
            "device": target.device,
            "uuid": f"GPU-{target.device}",
            "topology": {"pci": "0"},
        }

    monkeypatch.setattr(environment, "target", lambda name=None, _=None: Target(device=name or "cuda:0"))
    monkeypatch.setattr(environment, "collect", collect)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rows, "Group", Fake([None]))
    line = ("ring", "--seqlens", "64", "--impls", "ring", "--out", str(tmp_path), "-q")
    assert flashbench(*line) == 0
    about = runfile.load(tmp_path / "results.jsonl").header["environment"]
    assert about["ranks"] == [
        {"device": name, "uuid": f"GPU-{name}", "topology": {"pci": "0"}} for name in ("cuda:0", "cuda:1")
    ]
    assert about["host"] == "here"


def test_dry_run_and_io_model_agree(capsys: pytest.CaptureFixture[str]) -> None:
    grid = (
        "--seqlens",
        "64k",
        "--heads",
        "8",
        "--batch",
        "1",
        "--causal",
        "yes",
        "--gpu",
        "h100-sxm",
        "--json",
    )
    assert flashbench("ring", "--dry-run", "--world-size", "4", *grid) == 0
    first = json.loads(capsys.readouterr().out)
    assert flashbench("io-model", "--world-size", "4", *grid) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert [row["hidden"] for row in first] == [True, False, False]
    assert first[0]["link"] == "nvlink"


def test_what_is_not_modelled_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert flashbench("ring", "--dry-run", "--impls", "torch-cp", "--seqlens", "64k", "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert "not modelled" in row["reason"]


def test_who_named_a_card_is_not_told_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("ring", "--dry-run", "--world-size", "3", "--seqlens", "64k", "--impls", "ring,ulysses")
    advice = "times need a card"
    assert flashbench(*line, "--gpu", "h100-sxm") == 0
    assert advice not in capsys.readouterr().err
    assert flashbench(*line) == 0
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("ring", "--world-size", "0"), "--world-size"),
        (("ring", "--world-size", "65", "--device", "cpu"), "accepted on a CPU"),
        (("ring", "--seqlens", "1-4096+1"), "--seqlens"),
        (("ring", "--impls", "rang"), "ring"),
        (("ring", "--device", "cuda:1"), "a card to each rank"),
        (("ring", "--dtypes", "fp8"), "fp16, bf16, fp32"),
        (("ring", "--causal", "top-left", "--device", "cpu"), "--causal"),
        (("ring", "--gpu", "h100-sxm"), "--dry-run"),
        (("ring", "--dry-run", "--out", "x"), "--out 'x'"),
        (("ring", "--dry-run", "--check"), "--check and --dry-run"),
        (("ring", "--dry-run", "--link", "pcie"), "--gpu"),
        (("ring", "--link", "ethernet"), "nvlink"),
        (("ring", "--device", "cpu", "--link", "pcie"), "a CPU has no link"),
        (("io-model", "--link", "pcie"), "--world-size"),
        (("io-model", "--world-size", "2", "--link", "pcie"), "--gpu"),
        (("io-model", "--world-size", "2", "--models", "flash-v2"), "--models"),
        (("io-model", "--world-size", "2", "--explain"), "exclude each other"),
        (("io-model", "--world-size", "2", "--gpu", "l4", "--link", "nvlink"), "accepted: pcie"),
        (("kv-cache", "--model", "llama-3-8b", "--link", "pcie"), "--cp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(line: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flashbench(*line) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")


def test_a_report_shows_what_was_measured_across_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(ON_TWO.glob("*.jsonl"))
    page = tmp_path / "report.html"
    assert flashbench("report", *map(str, files), "--output", str(page), "-q") == 0
    shown = page.read_text().partition('id="across"')[2].partition("<section")[0]
    for file in files:
        for row in runfile.load(file).ring:
            assert f"<td>{row['implementation']}</td>" in shown
            if "speedup" in row:
                assert f"<td>{words.percent(row['efficiency'])}</td>" in shown
                assert f"<td>{words.seconds(row['time_s'])}</td>" in shown
            if "sent_bytes" in row:
                assert f"<td>{words.bytes_text(row['sent_bytes'])}</td>" in shown
    assert "2 × NVIDIA H200 over nvlink: fwd, causal, bf16" in shown
    assert 'id="latency"' not in page.read_text(), "a file without cells has no empty sections"
    capsys.readouterr()
    assert flashbench("report", str(files[1]), "--markdown") == 0
    said = capsys.readouterr().out
    assert said.startswith("## Attention on NVIDIA H200")
    assert "| tokens | algorithm | status |" in said


def measured_on_two_cards() -> Iterator[Mapping[str, Any]]:
    for name in ("forward", "backward", "others", "peer"):
        yield from runfile.load(ON_TWO / f"{name}.jsonl").ring


def test_two_cards_are_right_and_nearly_twice_as_fast_up_to_a_million_tokens() -> None:
    for row in measured_on_two_cards():
        assert row["status"] == "ok"
        assert row["query_rows"] >= 96
        assert (row["head_dim"], row["dtype"], row["causal"]) == (128, "bf16", True)
        assert row["implementation"] == "torch-cp" or row["sent_bytes"] == row["link_bytes"]
    rings = runfile.load(ON_TWO / "forward.jsonl").ring
    assert [row["seqlen"] for row in rings] == [2**17, 2**18, 2**19, 2**20]
    assert min(row["one_card_s"] / row["time_s"] for row in rings) >= 1.8


def test_the_docs_figures_of_two_cards_are_the_files() -> None:
    said = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
    rates, alone = list[float](), dict[int, float]()
    for row in measured_on_two_cards():
        apart = [""] * 3
        if rate := row.get("link_bytes_per_s"):
            apart = [words.seconds(row["compute_s"]), words.seconds(row["link_s"]), f"{rate / 1e9:.0f} GB/s"]
            rates.append(rate / links.of("h200").rate("nvlink"))
        line = [
            units.format_length(row["seqlen"]), row["pass"], f"`{row['implementation']}`",
            words.seconds(row["time_s"]), words.seconds(row["one_card_s"]), words.times(row["speedup"]),
            *apart, str(len(row["samples_s"])),
        ]  # fmt: skip
        assert f"| {' | '.join(line)} |\n" in said
        if row["pass"] == "fwd":
            alone.setdefault(row["seqlen"], row["flops_per_s"] * row["time_s"] / row["one_card_s"] / 1e12)
    assert f"reach {100 * min(rates):.0f} to {100 * max(rates):.0f} % of their 450 GB/s" in said
    assert f"[{100 * min(rates):.0f} to {100 * max(rates):.0f} %](#on-two-h200s)" in said
    assert f"{alone[2**20]:.0f} TFLOP/s at 1m and {alone[2**17]:.0f} at 128k" in said


def test_a_row_that_did_not_run_is_in_the_report_with_its_reason() -> None:
    failed = {
        "implementation": "ulysses",
        "pass": "fwd",
        "seqlen": 64,
        "status": "oom",
        "reason": "no <room>",
    }
    results = Results(table=table.build([]), headers={}, ring={"a": [failed]})
    [section] = [one for one in SECTIONS if one.key == "across"]
    frame = section.data(results)
    shown = section.page(section, frame)
    assert 'title="no &lt;room&gt;"' in shown
    assert "oom" in shown
    [one] = across_page.tables(frame)
    assert "oom: no &lt;room&gt;" in list(tabled.markdown(one))[-1]


def test_where_no_thread_is_left_a_rank_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RankLost, match=r"^rank 0 of 2 did not start: no thread is left .*t start new"):
        Group(2, "cpu", seed=0, limit_s=1.0)
