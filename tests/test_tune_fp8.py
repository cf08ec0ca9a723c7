"""tools/tune_fp8.py but for the GPU: what it tries, how it judges and times, the file that it writes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import torch  # noqa: E402
import tune_fp8  # noqa: E402
import tune_hopper  # noqa: E402
from fp8 import E4M3, guarded  # noqa: E402

from flashbench import hopper_configs  # noqa: E402
from flashbench.hopper_configs import SHARED_LIMIT, Tiles  # noqa: E402
from flashbench.kernels import _fp8, _hopper_fp8_kernels  # noqa: E402

FILE = ROOT / "reports" / "h200-sxm" / "tuning" / "flash-v3-fp8-guarded.json"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("load", tune_fp8.LOADS)
def test_forms_have_names_of_their_own_and_fit_and_the_tables_is_among_them(load: str, causal: bool) -> None:
    tried = tune_fp8.forms(load, causal)
    names = [one.name for one in (tune_fp8.bf16(causal), *tried)]
    assert len(set(names)) == len(names) == {"burst": 11, "sustained": 6}[load]
    assert set(tried) <= set(tune_fp8.forms("burst", causal))
    assert {hopper_configs.choose_fp8(128, 128, causal, keys) for keys in tune_fp8.LENGTHS} <= set(tried)
    assert all(hopper_configs.shared_bytes_fp8(one, 128, 128) <= SHARED_LIMIT for one in tried)
    assert {bool(one.promote) for one in tried} == {False, True}


def test_bf16_is_the_same_form_at_all_lengths() -> None:
    for causal in (False, True):
        found = {hopper_configs.choose(128, 128, causal, n, fp16=False) for n in tune_fp8.LENGTHS}
        assert found == {tune_fp8.bf16(causal)}


def test_the_shape_of_the_checks_is_ragged_grouped_and_more_than_a_tile_for_each_program() -> None:
    _, heads, kv_heads, rows, keys = tune_fp8.SHAPE
    assert rows % 128
    assert keys % 128
    assert heads > kv_heads
    assert heads * -(-rows // 128) > hopper_configs.PROGRAMS


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("sums", [False, True])
def test_the_kernels_arithmetic_is_within_the_limits_and_without_a_few_keys_is_not(
    sums: bool, shift: int
) -> None:
    """Whether a mean is taken off v before it is rounded and put back, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 128).bfloat16() for heads, n in ((4, 300), (2, 1205), (2, 1205)))
    taken = torch.full_like(v[:, :, :1], shift).float()
    x, y = (_fp8.quantise(one, E4M3, "block", 128) for one in (q, k))
    z = (_fp8.quantise_values if sums else _fp8.quantise)(v, E4M3, "block", 128)
    options = {"causal": True, "scale": 128**-0.5}
    if sums:
        o, lse = guarded(x, y, z, **options)
    else:
        o, lse = _fp8.attention(x, y, z, **options, lag=float(_hopper_fp8_kernels.LAZY.value))
    o = (o + taken.repeat_interleave(2, 1)).bfloat16()
    rounded = [_fp8.dequantise(one, torch.float64) for one in (x, y)]
    ref = tune_hopper.exact(*rounded, v.double() + taken, True)
    tune_fp8.judge(o, lse, ref)
    fewer = tune_hopper.exact(rounded[0], *(one[:, :, 8:] for one in (rounded[1], v.double() + taken)), True)
    with pytest.raises(AssertionError, match="is off by"):
        tune_fp8.judge(o, lse, fewer)


def test_the_process_that_times_prints_a_row_for_each_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_fp8, "inputs", lambda *shape: (None, None, None))
    monkeypatch.setattr(tune_fp8, "launched", lambda *_: (None, None, Mock(), None))
    monkeypatch.setattr(tune_fp8, "milliseconds", lambda call, number: 2.0)
    monkeypatch.setattr(tune_fp8, "gauge", lambda: lambda: {"mhz": 1500.0, "watts": 600.0})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    good = [[*of, asdict(tiles)] for *of, tiles in tune_fp8.cases("sustained")]
    cells = [(128, True, 4096), (128, False, 16384)]
    tune_fp8.time_cells(json.dumps([cells, good, "sustained"]))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "trying" not in line]
    assert [(row["causal"], row["seqlen"], row["batch"]) for row in rows] == [
        (True, 4096, 4),
        (False, 16384, 1),
    ]
    for row in rows:
        names = [tune_fp8.BF16, *(one.name for one in tune_fp8.forms("sustained", row["causal"]))]
        assert row["samples_ms"] == {name: [2.0] * 3 for name in names}
        assert row["watts"] == dict.fromkeys(names, 600.0)
        assert row["preparation_ms"] == {"all": [2.0] * 4, "v": [2.0] * 4}
        assert tune_fp8.said(row)


@pytest.mark.parametrize(("what", "share"), [("o", 1.0), ("o", 0.1), ("a row", 1.0), ("lse", 1.0)])
def test_what_is_further_off_than_the_limit_is_wrong(what: str, share: float) -> None:
    o, lse = torch.randn(1, 2, 4096, 128, dtype=torch.float64), torch.randn(1, 2, 4096, dtype=torch.float64)
    noise = torch.randn_like(o)
    off = noise * 0.9 * share * tune_fp8.WITHIN
    tune_fp8.judge(o + off, lse + 0.009, (o, lse), share)
    wrong, wrong_lse = o + off, lse.clone()
    if what == "o":
        wrong = o + off / 0.81
    elif what == "a row":
        wrong[0, 1, 77] *= 1.2
    else:
        wrong_lse[0, 1, 77] += 0.011
    with pytest.raises(AssertionError, match=f"{what}.* is off by"):
        tune_fp8.judge(wrong, wrong_lse, (o, lse), share)
    wrong[0, 0, 0, 0] = float("nan")
    with pytest.raises(AssertionError):
        tune_fp8.judge(wrong, lse, (o, lse), share)


def test_forms_take_turns_each_under_its_own_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def milliseconds(call: Any, number: int) -> float:
        ran.append((call(), number))
        return 0.5

    monkeypatch.setattr(tune_fp8, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {name: lambda name=name: name for name in "abc"}
    load = tune_fp8.Load(warm_ms=100, sample_ms=10, rounds=9)
    found = tune_fp8.sampled(calls, load, lambda: {"mhz": 1500.0})
    order = [name for name, number in ran[6:] if number == 200]
    assert ran[6:] == [(name, number) for name in order for number in (200, 20)]
    rounds = ["".join(order[i : i + 3]) for i in range(0, 27, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    before = {one[i - 1] + one[i] for one in rounds for i in (1, 2)}
    assert len(before) == 6, "each comes behind each of the others"
    assert found["samples_ms"] == dict.fromkeys("abc", [0.5] * 9)
    assert found["mhz"] == dict.fromkeys("abc", [1500.0] * 9)
    assert found["watts"] == {name: [] for name in "abc"}
    said = capsys.readouterr().out.split("\n")[:-1]
    assert [json.loads(line)["trying"] for line in said] == [*"abc", *order]


def test_a_file_is_what_its_readers_know() -> None:
    """Rows of what was measured before give the speeds that stand there; nothing that is read is missing."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    rows = []
    for old in known["rows"]:
        samples, mhz = old["samples_ms"], {one: [1700.0, 1500.0, 1600.0] for one in old["samples_ms"]}
        found = {"samples_ms": samples, "mhz": mhz, "watts": {one: [] for one in samples}}
        made = tune_fp8.row(old["causal"], old["seqlen"], found)
        old.pop("preparation_ms", None)
        assert {**made, "tflops": 0} == {**old, "tflops": 0, "mhz": made["mhz"], "watts": {}}
        assert made["tflops"] == pytest.approx(old["tflops"])
        assert made["mhz"] == dict.fromkeys(samples, 1600.0)
        rows.append(made)
    machine = {name: known[name] for name in ("device", "torch", "triton", "cudnn", "clocks")}
    machine["driver"] = "580.0"
    made = tune_fp8.document(machine, "burst", 1.5, tune_fp8.cases("burst"), rows)
    assert set(known) <= set(made)
    assert (made["load"], made["driver"], made["rounds"]) == ("burst", "580.0", 15)
    assert {row["seqlen"] for row in rows} == set(tune_fp8.LENGTHS)
    used = set(chain.from_iterable(row["samples_ms"] for row in rows)) - {tune_fp8.BF16}
    assert used <= set(made["configurations"])
    assert all(Tiles(**fields).name == name for name, fields in made["configurations"].items())
    json.dumps(made, allow_nan=False)


def test_a_cell_is_a_line() -> None:
    speeds = {tune_fp8.BF16: 600.0, "slow": 540.0, "fast": 900.0}
    read = {"mhz": {"fast": 1500.4}, "watts": {"fast": 699.6}}
    line = tune_fp8.said({"causal": True, "seqlen": 4096, "tflops": speeds, **read})
    assert line == (
        "causal  4096 | fast 900 (1.500) 1500 MHz 700 W, flash-v3 bf16 600 (1.000), slow 540 (0.900)"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--out is a file in a folder that is there; got None"),
        (["--out", "nowhere/file.json"], "--out is a file in a folder that is there; got nowhere/file.json"),
        (["--out", "."], "--out is a file in a folder that is there; got ."),
        (["--out", str(ROOT / "docs")], f"--out is a file in a folder that is there; got {ROOT / 'docs'}"),
        (["--out", "file.json", "--budget", "0"], "--budget is more than 0 seconds; got 0"),
        (["--out", "file.json", "--budget", "nan"], "--budget is more than 0 seconds; got nan"),
        (["--out", "file.json", "--load", "light"], "invalid choice: 'light'"),
        (["--out", "file.json"], "it runs on an sm_90 GPU, and torch sees none"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_in_a_line(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune_fp8.py", *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        tune_fp8.main()
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


SCRIPT = """
import json, sys, time
asked = json.loads(sys.argv[2])
if sys.argv[1] == "--check":
    if asked[2]["stages"] == 4:
        time.sleep(60)
    sys.exit("off" if asked[2]["emulated"] else 0)
for n, cell in enumerate(asked[0]):
    for _, causal, fields in asked[1]:
        if causal == cell[1]:
            print(json.dumps({"trying": "form"}), flush=True)
            print(json.dumps({"trying": f"2w.n128.s{fields['stages']}.q2"}), flush=True)
            if n and fields["stages"] == 3:
                time.sleep(60)
    print(json.dumps({"cell": cell, "forms": len(asked[1]), "told": asked[2]}), flush=True)
"""


@pytest.mark.slow
def test_what_hangs_is_killed_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "tool.py"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(tune_hopper, "HANG_S", 4)
    monkeypatch.setattr(tune_hopper, "SILENT_S", 4)
    tried = [Tiles(), Tiles(stages=3), Tiles(stages=4), Tiles(emulated=2)]
    cases = [(128, True, one) for one in tried]
    right = list(tune_hopper.right(cases, None, script=str(script)))
    assert sorted(right, key=cases.index) == cases[:2]
    cells = [(128, True, n) for n in (4096, 16384, 8192)]
    rows = list(tune_hopper.timed(cells, cases[:2], time.monotonic() + 60, "burst", script=str(script)))
    assert [row["cell"][2] for row in rows] == [4096, 16384, 8192]
    assert [row["forms"] for row in rows] == [2, 1, 1]
    assert {row["told"] for row in rows} == {"burst"}
    said = capsys.readouterr().out
    assert "d128 causal 2w.n128.s4.q2: HANGS" in said
    assert "d128 causal 2w.n128.s2.q2.e2: WRONG: off" in said
    assert "(128, True, 16384): 2w.n128.s3.q2 HANGS or fails" in said


@pytest.mark.slow
def test_a_cell_is_left_out_where_what_it_is_timed_beside_hangs_and_no_time_is_left_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "tool.py"
    wait = 'if cell[2] == 4096: print(json.dumps({"trying": "bf16"}), flush=True); time.sleep(60)'
    head, _, _ = SCRIPT.partition("    for _, causal")
    script.write_text(f"{head}    {wait}\n    print(json.dumps({{'cell': cell}}), flush=True)\n")
    monkeypatch.setattr(tune_hopper, "SILENT_S", 3)
    cells, good = [(128, True, n) for n in (4096, 16384)], [(128, True, Tiles())]
    rows = list(tune_hopper.timed(cells, good, time.monotonic() + 60, None, script=str(script)))
    assert [row["cell"][2] for row in rows] == [16384]
    talks = 'while True: print(json.dumps({"trying": "x"}), flush=True); time.sleep(0.3)\n'
    script.write_text(f"import json, time\n{talks}")
    started = time.monotonic()
    assert list(tune_hopper.timed(cells, good, started + 2, None, script=str(script))) == []
    assert time.monotonic() - started < 20
