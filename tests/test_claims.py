"""The literature's claims: verdicts follow from the rows alone, and the page is what the command prints."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from test_cli_help import options

from flashbench import claims, kernels, runfile, table, unstarted
from flashbench.claim import VERDICTS
from flashbench.cli import main
from flashbench.errors import RunFileError, UsageError
from flashbench.problem import PASSES, Cell, Problem
from flashbench.units import parse_int

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import claims_page  # noqa: E402

FILE, RESULTS = ROOT / "configs" / "claims.toml", ROOT / "reports" / "h100-sxm"
HEAD = 'name = "x"\nsays = "it is so"\nsource = "s"\nconditions = "c"\ncommand = "flashbench run"\n'
RATIO = (
    "[[claim]]\n" + HEAD + "at_least = 2\nat_most = 4\n"
    'ratio = [{ of = { file = "r.json", implementation = "a" }, '
    'to = { file = "r.json", implementation = "b" } }]'
)  # fmt: skip


def row(implementation: str, time_s: float, **more: Any) -> dict[str, Any]:
    return {"implementation": implementation, "time_s": time_s, "batch": 1, "seqlen_q": 16, **more}


def judged(tmp_path: Path, text: str, *rows: dict[str, Any]) -> claims.Judged:
    (tmp_path / "claims.toml").write_text(text)
    if rows:
        (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    [one] = claims.judge(claims.load(tmp_path / "claims.toml"), tmp_path)
    return one


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ((2.0, 4.0), "holds"),
        ((1.9, 4.1), "does not hold"),
        ((3.0, 4.1), "holds in 1 of 2 cells"),
        ((), "not measured"),
    ],
)
def test_a_verdict_follows_from_the_cells(tmp_path: Path, times: tuple[float, ...], verdict: str) -> None:
    rows = [
        one for n, t in enumerate(times, 1) for one in (row("a", t, seqlen_q=n), row("b", 1.0, seqlen_q=n))
    ]
    one = judged(tmp_path, RATIO, *rows)
    assert one.verdict == verdict
    assert [seen.value for seen in one.found] == list(times)
    assert ("flashbench run" in one.shown) == (not times)


RANGE = RATIO.replace("at_least", "range = true\nat_least")
NECESSARY = RATIO.replace("at_least", "necessary = true\nat_least")
SOME = RATIO.replace("at_least", "some = true\nat_least")


@pytest.mark.parametrize(
    ("text", "times", "verdict"),
    [
        (RANGE, (2.0, 4.0), "holds"), (RANGE, (1.0, 3.0, 5.0), "holds in 1 of 3 cells"),
        (RANGE, (5.0, 6.0), "more than claimed"),
        (RANGE, (1.0, 4.1, 5.0), "more than claimed in 2 of 3 cells"),
        (RANGE, (1.0, 1.9), "less than claimed"),
        (RANGE, (1.0, 1.9, 3.0), "less than claimed in 2 of 3 cells"),
        (RANGE, (1.0, 5.0), "does not hold"),
        (NECESSARY, (2.0, 3.0), "not refuted"), (NECESSARY, (2.0, 4.1), "refuted in 1 of 2 cells"),
        (NECESSARY, (1.0, 4.1), "does not hold"),
        (SOME, (1.0, 3.0, 5.0), "holds, by 1 of 3 cells"), (SOME, (2.0, 3.0), "holds, by 2 of 2 cells"),
        (SOME, (1.0, 5.0), "does not hold"),
    ],
)  # fmt: skip
def test_a_range_has_two_ends_and_what_is_necessary_shows_nothing(
    tmp_path: Path, text: str, times: tuple[float, ...], verdict: str
) -> None:
    rows = [
        one for n, t in enumerate(times, 1) for one in (row("a", t, seqlen_q=n), row("b", 1.0, seqlen_q=n))
    ]
    assert judged(tmp_path, text, *rows).verdict == verdict
    said = re.sub(r"\d+ of \d+", "n of m", verdict)
    assert {said, said.removesuffix(" in n of m cells")} & set(VERDICTS)


@pytest.mark.parametrize("flags", [["launch-bound"], "suspect multimodal"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_time_that_is_not_the_gpus_decides_nothing(tmp_path: Path, side: str, flags: Any) -> None:
    """On either side of a ratio of times; flags are text in a table and a list in rows."""
    rows = [row(name, t, seqlen_q=n) for n, t in ((16, 9.0), (32, 3.0)) for name in "ab"]
    rows = [{**one, "time_s": one["time_s"] if one["implementation"] == "a" else 1.0} for one in rows]
    marked = [one | ({"flags": flags} if (one["implementation"], one["seqlen_q"]) == (side, 16) else {})
              for one in rows]  # fmt: skip
    one = judged(tmp_path, RATIO, *marked)
    name = flags[0] if isinstance(flags, list) else "suspect"
    assert (one.verdict, [seen.value for seen in one.found]) == ("holds", [3.0])
    assert one.shown == f"3; 1 cell left out, flagged {name}"
    assert one.row()["left_out"] == [{"cell": "a b1 n16", "flags": [name]}]
    alone = judged(tmp_path, RATIO, *marked[:2])
    assert alone.verdict == "not measured"
    assert alone.shown == f"the only cell is flagged {name}; measured by `flashbench run`"
    assert judged(tmp_path, RATIO, *(one | {"flags": ["multimodal"]} for one in rows)).left_out == ()
    memory = RATIO.replace("implementation =", 'metric = "bytes", implementation =')
    counted = judged(tmp_path, memory, *({**one, "bytes": one["time_s"]} for one in marked))
    assert [seen.value for seen in counted.found] == [9.0, 3.0]


def test_the_page_has_every_verdict_and_when_it_is_given() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    for verdict, when in VERDICTS.items():
        assert f"| `{verdict}` | {when} |" in page


def test_claims_of_a_range_have_both_ends() -> None:
    """What says "2 to 4 times" or "about twice" is a range; a word on a condition is in its data too."""
    for one in claims.load(FILE):
        numbers = re.search(r"\d to \d|twice as fast|doubles", one.says)
        assert bool(numbers) == one.range or one.untestable or one.name == "decode-8x", one.name
        assert ("necessary" in one.conditions) == one.necessary, one.name


def test_only_cells_that_differ_in_nothing_else_are_set_beside_each_other(tmp_path: Path) -> None:
    one = judged(
        tmp_path, RATIO, row("a", 3.0, dtype="bf16"), row("b", 1.0, dtype="fp16"), row("a", 2.0, dtype="fp16")
    )
    assert [seen.value for seen in one.found] == [2.0]


@pytest.mark.parametrize(
    ("text", "cells", "verdict"),
    [
        (RATIO, ((2.2, 0.05), (2.2, 0.2)), "holds; 1 of 2 cells too noisy to tell"),
        (
            RATIO,
            ((3.0, 0.05), (1.0, 0.05), (1.9, 0.2)),
            "holds in 1 of 2 cells; 1 of 3 cells too noisy to tell",
        ),
        (RATIO, ((1.9, 0.2), (4.1, 306.0)), "too noisy to tell"),
        (RATIO, ((2.0, 0.0),), "holds"),
        (RATIO, ((1.0, 0.9),), "does not hold"),
        (RANGE, ((4.2, 0.1), (3.0, 0.1)), "holds; 1 of 2 cells too noisy to tell"),
        (NECESSARY, ((4.2, 0.1), (3.0, 0.1)), "not refuted; 1 of 2 cells too noisy to tell"),
    ],
    ids=str,
)
def test_a_cell_within_its_spread_of_a_bound_decides_nothing(
    tmp_path: Path, text: str, cells: tuple[tuple[float, float], ...], verdict: str
) -> None:
    """Of b, which is 1.0 sharp, the spread is 0: a ratio's is that of a."""
    rows = []
    for n, (middle, spread) in enumerate(cells, 1):
        half = middle * spread / 2
        samples = [middle - half, middle - half, middle, middle + half, middle + half]
        rows += [row("a", middle, seqlen_q=n, samples_s=samples), row("b", 1.0, seqlen_q=n)]
    one = judged(tmp_path, text, *rows)
    assert one.verdict == verdict
    assert len(one.found) == len(cells)
    told = [cell["tells"] for cell in one.row()["cells"]]
    assert told.count(False) == (len(cells) if verdict == "too noisy to tell" else int("noisy" in verdict))
    said = re.sub(r"\d+ of \d+", "n of m", verdict.rpartition("; ")[2])
    assert {said, f"…; {said}", said.removesuffix(" in n of m cells")} & set(VERDICTS)


def test_spread_is_that_of_both_sides(tmp_path: Path) -> None:
    samples = [1.0, 1.0, 1.1, 1.3, 1.3]
    one = judged(tmp_path, RATIO, row("a", 2.2, samples_s=[2 * x for x in samples]), row("b", 1.1))
    assert one.found[0].spread == pytest.approx(0.3 / 1.1)
    assert "spread ≤ 27.3 %" in one.shown


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "holds"), (2.0, "does not hold")])
def test_a_slope_is_the_exponent_of_the_length(tmp_path: Path, power: float, verdict: str) -> None:
    text = f'[[claim]]\n{HEAD}at_least = 0.9\nat_most = 1.1\nslope = {{ file = "r.json", metric = "bytes" }}'
    rows = [row("a", 1.0, seqlen_q=n, batch=64 // n, bytes=(64 // n) * n**power) for n in (4, 8, 16)]
    one = judged(tmp_path, text, *rows)
    assert one.verdict == verdict
    assert one.found[0].value == pytest.approx(power)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[claim", "is no TOML"), ("x = 1", "has no [[claim]]"),
        ('[[claim]]\nnme = "x"', "'nme' is not known"), ('[[claim]]\nname = "x"', "says must be text"),
        ("[[claim]]\n" + HEAD.rpartition("command")[0], "must be given"),
        (f'[[claim]]\n{HEAD}at_most = "2"', "at_most must be a number"),
        (f"[[claim]]\n{HEAD}range = 1", "range must be true or false"),
        (f'[[claim]]\n{HEAD}unit = "GB"', "unit must be bytes"),
        (f"[[claim]]\n{HEAD}range = true\nat_most = 2", "a range must have both ends"),
        (RATIO + "\nproduct = [1]", "one of ratio"), (f"[[claim]]\n{HEAD}ratio = [1]", "claim x: TypeError"),
        (f'[[claim]]\n{HEAD}ratio = [{{ of = {{ file = "r.json" }} }}]', "claim x: KeyError: 'to'"),
    ],
)  # fmt: skip
def test_what_is_no_claim_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        judged(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*; accepted: a TOML file of claims"):
        claims.load(tmp_path / "none.toml")


SPILLS = (
    f"[[claim]]\n{HEAD}at_most = -1\n"
    'difference = [{ of = { file = "s.json", implementation = "a", metric = "spilled" }, '
    'to = { file = "s.json", implementation = "b", metric = "spilled" } }]'
)


@pytest.mark.parametrize(
    ("of", "to", "seen", "verdict"),
    [
        ((1, 2), (4, 0), [-1.0], "holds"), ((4, 0), (1, 2), [1.0], "does not hold"),
        ((0, 0), (0, 0), [], "not measured"), ((2, 0), (0, 2), [0.0], "does not hold"),
    ],
)  # fmt: skip
def test_a_difference_is_of_all_kernels_of_a_cell(
    tmp_path: Path, of: tuple[int, ...], to: tuple[int, ...], seen: list[float], verdict: str
) -> None:
    """As of rows of profile --static, a list without a card; nothing is seen where neither side has any."""
    rows = [
        {"implementation": name, "kernel": str(number), "arch": "sm_90", "spilled": spilled}
        for name, side in (("a", of), ("b", to))
        for number, spilled in enumerate(side)
    ]
    other = [{**row, "arch": "sm_80", "spilled": 0} for row in rows]
    (tmp_path / "s.json").write_text(json.dumps(rows + other))
    one = judged(tmp_path, SPILLS)
    assert [found.value for found in one.found] == seen
    assert one.verdict == verdict
    assert one.of_a_card == (not seen)  # a compiler's word, and no card's


def test_the_rows_of_one_run_count_once_and_not_against_themselves() -> None:
    """A claim names several files of the same rows, or sides that the file alone tells apart."""
    sides = [{"file": f"{n}.jsonl", "implementation": name} for n in (1, 2) for name in ("a", "b")]
    one = {"name": "x", "says": "so", "source": "s", "conditions": "c", "command": "flashbench run"}
    twice = [{"of": sides[0], "to": sides[1]}, {"of": sides[2], "to": sides[3]}]
    apart = [{"of": sides[0], "to": sides[2]}]
    known = [claims.Claim(**one, seen={"ratio": pairs}) for pairs in (twice, apart)]
    [found] = claims.of_rows(known, [row("a", 2.0), row("b", 1.0)])
    assert found.claim is known[0]
    assert [seen.value for seen in found.found] == [2.0]


def test_how_busy_tensor_cores_were_is_read_from_counters(tmp_path: Path) -> None:
    """As ``profile --counters --detail`` writes it: a run without it says nothing."""
    folder = tmp_path / "detail"
    folder.mkdir()
    records = [
        synthetic.record(
            name,
            status="profiled",
            reason="counted",
            counters={"total": {"tensor_share": share}, "kernels": []},
        )
        for name, share in (("flash", 0.71), ("naive", 0.13))
    ] + [synthetic.record("flash", 2048)]
    head = runfile.header(argv=["flashbench"], options={}, environment={}, cells=())
    with runfile.create(folder / "results.jsonl", head) as writer:
        for record in records:
            writer.append(record)
    found = {one.claim.name: one for one in claims.judge(claims.load(FILE), tmp_path)}
    for name, value, verdict in (
        ("tensor-cores", 0.71, "does not hold"), ("tensor-cores-eager", 0.13, "holds"),
    ):  # fmt: skip
        assert [one.value for one in found[name].found] == [value]
        assert found[name].verdict == verdict


def test_layers_and_cards_are_read_from_files(tmp_path: Path) -> None:
    """What ``block --out`` writes, and the card that wrote it."""
    environment = {"device_name": "a card"}
    path = tmp_path / "b.jsonl"
    head = runfile.header(argv=["flashbench"], options={}, environment=environment, cells=())
    with runfile.create(path, head) as writer:
        for name, time_s in (("naive", 3.0), ("flash", 2.0)):
            writer.put({"type": "blocks", "implementation": name, "model": "m", "seqlen": 16,
                        "mode": "infer", "dtype": "bf16", "status": "ok", "batch": 1, "layers": 1,
                        "time_s": time_s, "samples_s": [time_s] * 5})  # fmt: skip
    sides = [f'{{ file = "b.jsonl", model = "m", implementation = "{name}" }}' for name in ("naive", "flash")]
    one = judged(tmp_path, f"[[claim]]\n{HEAD}ratio = [{{ of = {sides[0]}, to = {sides[1]} }}]")
    assert [(seen.cell, seen.value, seen.card) for seen in one.found] == [
        ("m infer naive b1 n16 bf16", 1.5, "a card")
    ]
    assert one.row()["cards"] == ["a card"]


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(RunFileError, match="has no rows"):
        judged(tmp_path, RATIO)


def test_every_claim_is_measured_by_a_command_that_there_is() -> None:
    known = claims.load(FILE)
    assert len({one.name for one in known}) == len(known)
    for one in known:
        assert bool(one.command) != (bool(one.untestable) or "product" in one.seen), one.name
        if not one.command:
            continue
        program, command, *rest = shlex.split(one.command)
        assert program == "flashbench"
        assert {word for word in rest if word.startswith("--")} <= set(options(command)), one.name
        names = rest[rest.index("--impls") + 1].split(",") if "--impls" in rest else []
        assert set(names) <= set(kernels.registry()), one.name


def test_cells_of_layers_are_those_that_their_command_measures() -> None:
    """At batches that keep a GPU busy: launch-bound cells would decide nothing."""
    found = [one for one in claims.load(FILE) if one.command.startswith("flashbench block")]
    assert {one.name for one in found} == {"gpt2-3x", "bert-15-percent"}
    for one in found:
        words = shlex.split(one.command)
        asked = {name: words[words.index(f"--{name}") + 1] for name in ("model", "batch", "seqlens", "out")}
        for side in (side for pair in one.seen["ratio"] for side in pair.values()):
            assert (side["model"], str(side["batch"])) == (asked["model"], asked["batch"])
            assert side["seqlen"] == parse_int(asked["seqlens"], "seqlens")
            assert asked["out"].endswith("/" + side["file"])
            assert side["batch"] * side["seqlen"] >= 2**15


TABLES = re.findall(
    r"<!-- claims ?([^>]*?) ?-->\n(.*?)\n<!-- /claims -->",
    (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), flags=re.DOTALL,
)  # fmt: skip


@pytest.mark.parametrize(("given", "shown"), TABLES, ids=[given for given, _ in TABLES])
def test_the_page_is_what_the_results_say(
    given: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        main(["claims", *given.split(), "--markdown"])
    assert stop.value.code == 0
    assert shown == capsys.readouterr().out.rstrip("\n"), f"flashbench claims {given} --markdown"


def test_the_tool_writes_the_page(tmp_path: Path) -> None:
    """Tables that are older come anew, all else stays."""
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    (tmp_path / "claims.md").write_text(text.replace("| not measured |", "| holds |"), encoding="utf-8")
    assert claims_page.main([], tmp_path / "claims.md") == 1
    assert claims_page.main(["--write"], tmp_path / "claims.md") == 0
    assert (tmp_path / "claims.md").read_text(encoding="utf-8") == text
    assert claims_page.main([], tmp_path / "claims.md") == 0


def test_the_page_shows_all_of_them() -> None:
    assert TABLES[0][0] == ""
    assert TABLES[0][1].count("\n") == 1 + len(claims.load(FILE))


def test_measured_leaves_out_what_is_only_said_and_hides_nothing_that_cells_could_tell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = f"{RESULTS}/decode/.."
    with pytest.raises(SystemExit):
        main(["claims", "--results", folder, "--measured", "--json"])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["fwd-over-eager"]["cells"]
    assert found["paging-costs"]["cards"]
    assert not set(found) & {"score-matrix-40gb", "on-chip-memory-doubled", "path-x", "v2-spills-less"}
    file = next(one.seen["ratio"][0]["of"]["file"] for one in claims.load(FILE) if one.name == "gpt2-3x")
    if not (RESULTS / file).exists():
        assert found["gpt2-3x"]["verdict"] == "not measured"
        assert found["gpt2-3x"]["shown"].startswith(f"no results of `{file}`: `flashbench block ")
        assert f"--out {folder}/{file}`" in found["gpt2-3x"]["shown"]


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    """In the folder that is asked about, quoted for a shell; a file that is there lacks cells."""
    text = RATIO.replace("flashbench run", "flashbench run --out {results}/r.json")
    folder = tmp_path / "my results"
    folder.mkdir()
    (folder / "claims.toml").write_text(text)
    [one] = claims.judge(claims.load(folder / "claims.toml"), folder)
    assert one.shown == f"no results of `r.json`: `flashbench run --out '{folder}'/r.json`"
    [named] = claims.judge(claims.load(folder / "claims.toml"), folder, "here")
    assert named.shown == "no results of `r.json`: `flashbench run --out here/r.json`"
    (folder / "r.json").write_text(json.dumps({"rows": [row("a", 1.0)]}))
    [one] = claims.judge(claims.load(folder / "claims.toml"), folder, "here")
    assert (one.verdict, one.shown.partition(":")[0]) == ("not measured", "no such cells in `r.json`")


def test_commands_write_what_the_claim_reads() -> None:
    """Somewhere below --results; of two files the command is that of one."""
    for one in claims.load(FILE):
        if not one.of_cells:
            continue
        words = shlex.split(one.command)
        out = words[words.index("--out") + 1] if "--out" in words else words[-1]
        pairs = next(iter(one.seen.values()))
        both = isinstance(pairs, list)
        sides = [pair[which] for pair in pairs for which in ("of", "to")] if both else [pairs]
        files = {f"{claims.FOLDER}/{side['file']}" for side in sides}
        assert out in files or f"{out}/results.jsonl" in files, one.name


LENGTHS = re.compile(r"(\d+k?) to (\d+k?) tokens")


def test_a_claim_of_some_lengths_counts_these_alone() -> None:
    """Those of its conditions, unless they say "here" others."""
    found = 0
    for one in claims.load(FILE):
        if not (said := LENGTHS.search(one.conditions.partition("here")[2] or one.conditions)
                or LENGTHS.search(one.conditions)):  # fmt: skip
            continue
        least, most = (parse_int(text, "tokens") for text in said.groups())
        for side in (side for pair in one.seen["ratio"] for side in pair.values()):
            assert side["seqlen_q"] == {"at_least": least, "at_most": most}, one.name
            found += 1
    assert found >= 16


def test_lengths_outside_the_bounds_of_a_side_do_not_count(tmp_path: Path) -> None:
    text = RATIO.replace(
        'implementation = "a"', 'implementation = "a", seqlen_q = { at_least = 32, at_most = 64 }'
    )
    rows = [
        row(name, t, seqlen_q=n) for n in (16, 32, 64, 128) for name, t in (("a", 2.0 + n / 100), ("b", 1.0))
    ]
    assert [seen.value for seen in judged(tmp_path, text, *rows).found] == [2.32, 2.64]
    none = [{**one, "seqlen_q": None} for one in rows]
    assert judged(tmp_path, text, *none).found == ()


def test_bytes_have_their_unit(tmp_path: Path) -> None:
    one = judged(tmp_path, f'[[claim]]\n{HEAD}unit = "bytes"\nat_least = 4e10\nproduct = [100000, 100000, 2]')
    assert (one.shown, one.verdict) == ("20.0 GB", "does not hold")
    text = SPILLS.replace("at_most", 'unit = "bytes"\nat_most')
    rows = [{"implementation": name, "arch": arch, "spilled": spilled}
            for arch, both in (("sm_80", (2, 2050)), ("sm_90", (28, 0)), ("sm_100", (1, 3)))
            for name, spilled in zip("ab", both, strict=True)]  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(rows))
    assert judged(tmp_path, text).shown == "-2.05 kB to 28 B, median -2 B of 3 cells"


SKIPPED = {"status": "skipped", "reason": "time budget of 9s spent", "time_s": None}


@pytest.mark.parametrize("side", ["a", "b"])
def test_cells_that_a_budget_kept_from_being_begun_are_said(tmp_path: Path, side: str) -> None:
    """On either side of a ratio; a cell that cannot be run is none, and one without room is no such."""
    rows = [
        {**row(name, 3.0 if name == "a" else 1.0, seqlen_q=n, seqlen_k=n, causal=causal, status="ok")}
        for causal in (False, True) for n in (1024, 2048, 4096) for name in "ab"
    ]  # fmt: skip
    for one in rows:
        if one["causal"] and one["seqlen_k"] > 1024 and one["implementation"] == side:
            one |= SKIPPED
        if not one["causal"] and one["seqlen_k"] == 4096:
            one |= {"status": "unsupported", "reason": "it cannot", "time_s": None}
        if not one["causal"] and one["seqlen_k"] == 2048 and one["implementation"] == "b":
            one |= {"status": "skipped", "reason": "needs 9 GB", "time_s": None}
    one = judged(tmp_path, RATIO, *rows)
    said = "2 of 5 cells were not begun: causal, at 2k and 4k; time budget of 9s spent"
    assert one.shown == f"3 to 3, median 3 of 2 cells; {said}"
    assert one.row()["not_begun"] == [said]
    none = judged(tmp_path, RATIO, *({**one, **SKIPPED} for one in rows))
    assert none.verdict == "not measured"
    assert none.shown == (
        "none of 6 cells was begun: at 1k, 2k and 4k; time budget of 9s spent; measured by `flashbench run`"
    )


STOPPED = RATIO.replace("r.json", "r.jsonl").replace('"a"', '"naive"').replace('"b"', '"flash"')


def test_cells_that_an_interrupt_kept_from_being_reached_are_said(tmp_path: Path) -> None:
    """Planned and without a row; not those whose like was refused at every length that was reached."""
    every = [
        synthetic.record(name, n, causal=causal)
        for causal in (False, True) for n in (1024, 2048, 4096) for name in ("naive", "flash", "sdpa")
    ]  # fmt: skip
    reached = [one for one in every if not (one.cell.problem.causal and one.cell.problem.seqlen_q > 1024)]
    text = STOPPED.replace('"flash"', '["flash", "sdpa"]')

    def shown(*records: Any) -> claims.Judged:
        (tmp_path / "r.jsonl").unlink(missing_ok=True)
        head = runfile.header(argv=["flashbench", "run"], options={}, environment={},
                              cells=[one.cell for one in every])  # fmt: skip
        with runfile.create(tmp_path / "r.jsonl", head) as writer:
            for one in records:
                writer.append(one)
        return judged(tmp_path, text)

    said = "2 of 6 cells were not begun: causal, at 2k and 4k; not reached by the run"
    assert shown(*reached).shown.endswith(f"; {said}")
    assert shown(*every).not_begun == ()
    refused = [
        replace(one, status="unsupported", reason="it cannot", samples=None)
        if one.cell.problem.causal and one.cell.implementation == "naive" else one
        for one in reached
    ]  # fmt: skip
    assert shown(*refused).not_begun == ()
    none = shown()
    assert none.verdict == "not measured"
    assert none.not_begun == ("none of 6 cells was begun: at 1k, 2k and 4k; not reached by the run",)
    assert "no such cells" not in none.shown


def test_a_cell_that_another_file_has_was_begun(tmp_path: Path) -> None:
    """A sweep that was stopped and one of its rest make a whole."""
    every = [synthetic.record(name, n) for n in (1024, 2048, 4096) for name in ("naive", "flash")]
    for name, records in (("r", every[:4]), ("rest", every[2:5])):
        head = runfile.header(argv=["flashbench"], options={}, environment={},
                              cells=[one.cell for one in every])  # fmt: skip
        with runfile.create(tmp_path / f"{name}.jsonl", head) as writer:
            for one in records:
                writer.append(one)
    pair = STOPPED[STOPPED.index("{ of") : STOPPED.index("]", STOPPED.index("{ of"))]
    text = STOPPED.replace(pair, f"{pair}, {pair.replace('r.jsonl', 'rest.jsonl')}")
    one = judged(tmp_path, text)
    assert (len(one.found), len(one.not_begun)) == (3, 1)
    assert one.not_begun[0].endswith("at 4k; not reached by the run")


def test_a_key_of_a_planned_cell_tells_what_its_row_would() -> None:
    shapes = [
        {"seqlen_q": 7, "seqlen_k": 64, "causal": True, "window": (4, -1)}, {"num_kv_heads": 2},
        {"head_dim_v": 32, "dtype": "fp8", "softcap": 30.0}, {"bias": "1hqk", "alibi": True},
        {"lengths": ((16, 16), (8, 64)), "batch": 2, "seqlen_q": 16, "seqlen_k": 64}, {},
    ]  # fmt: skip
    base = {"batch": 3, "num_heads": 4, "num_kv_heads": 4, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 64,
            "head_dim_v": 64, "dtype": "bf16", "causal": False}  # fmt: skip
    for shape, pass_, name in zip(shapes, PASSES * 2, ("flash", "f.py:g", "a b") * 2, strict=True):
        cell = Cell(implementation=name, problem=Problem(**{**base, **shape}), pass_=pass_)
        record = replace(synthetic.record("flash", 64), cell=cell)
        [there] = table.rows(table.build([synthetic.run_file([record])]))
        [told] = unstarted.unreached({"cells": [cell.key, 7, "nobody's", None]}, [])
        assert unstarted.is_one(told)
        assert {name: there[name] for name in told if name not in ("status", "reason")} == {
            name: value for name, value in told.items() if name not in ("status", "reason")
        }
        assert set(told) >= {*table.PROBLEM_COLUMNS, "options", "implementation", "pass"}
        assert unstarted.unreached({"cells": [cell.key]}, [there]) == []


def test_fields_of_another_type_are_refused_in_one_line(tmp_path: Path) -> None:
    """Of rows of a JSON document, which nothing looks at before; and bounds that are none."""
    rows = [{**row(name, 1.0), **SKIPPED, "model": [name]} for name in "ab"]
    with pytest.raises(UsageError, match="claim x: TypeError: ") as error:
        judged(tmp_path, RATIO, *rows)
    assert "\n" not in str(error.value)
    text = RATIO.replace('"a"', '"a", batch = { at_least = "1" }')
    with pytest.raises(UsageError, match="claim x: TypeError: "):
        judged(tmp_path, text, row("a", 1.0), row("b", 1.0))


def test_a_cell_that_was_not_begun_did_not_fail_to_run(tmp_path: Path) -> None:
    text = f'[[claim]]\n{HEAD}at_least = 1\nran = {{ file = "r.json", implementation = "a" }}'
    rows = [row("a", 1.0, seqlen_k=n, status="ok") for n in (16, 32)] + [
        {**row("a", 1.0, seqlen_k=64), **SKIPPED}
    ]
    one = judged(tmp_path, text, *rows)
    assert ([seen.value for seen in one.found], one.verdict) == ([1.0, 1.0], "holds")
    assert one.shown.endswith("1 of 3 cells was not begun: at 64; time budget of 9s spent")


def test_block_sparse_is_set_beside_each_method_alone() -> None:
    """Its paper's claim is of every method, and each is another implementation; one is the bundled kernel."""
    from flashbench.kernels import alternatives

    over = {one.name: one for one in claims.load(FILE) if one.name.startswith("sparse-over-")}
    names = {name: one.seen["ratio"][0]["of"]["implementation"] for name, one in over.items()}
    assert sorted(names.values()) == ["linear-attention", "linformer", "longformer", "reformer"]
    for name, one in over.items():
        [pair] = one.seen["ratio"]
        assert (pair["to"]["implementation"], one.at_least) == ("block-sparse", 1)
        bundled = kernels.get(names[name]).precompile is not kernels.get("linformer").precompile
        assert ("torch's operators" not in one.conditions) == bundled, name
    [some] = [one for one in claims.load(FILE) if one.name == "sparse-8x"]
    assert (some.at_least, some.some) == (8, True)
    assert sorted(some.seen["ratio"][0]["of"]["implementation"]) == sorted(names.values())
    assert alternatives.KERNEL == "flash"
