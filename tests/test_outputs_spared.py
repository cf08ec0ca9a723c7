"""No output takes the place of a results file or of what the command reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from judging import cell, written
from test_runfile import cells, done, write

from flashbench import cli, paths
from flashbench.errors import EXIT_USAGE

ROOT = Path(__file__).parent.parent
RESULTS, INPUT = "is a results file, which is not overwritten", "which is not overwritten; accepted: another"
LINES = {
    "compare {rows} {rows} -o junit={rows}": INPUT, "compare {other} {other} -o json={rows}": RESULTS,
    "compare {other} {other} -o json={link}": RESULTS, "compare {gate} {gate} -o json={gate}": INPUT,
    "calibrate --device cpu --out {rows}": RESULTS, "gate --config {toml} --out {rows}": RESULTS,
    "gate --config {toml} --out {toml}": INPUT, "noise {rows} --out {rows}": RESULTS,
    "io-model --seqlens 1k --html {rows}": RESULTS, "kv-cache --model llama-3-8b --html {rows}": RESULTS,
    "io-model --seqlens 1k --gpu {toml} --html {toml}": INPUT, "history {rows} --html {rows}": RESULTS,
    "decode --out {rows}": RESULTS, "decode --check --pairs --out {rows}": RESULTS,
    "report {other} -o {rows}": RESULTS, "report {rows} -o {rows}": INPUT,
    "report {rows} --ceilings {toml} -o {toml}": INPUT, "tune --out {rows}": RESULTS,
    "check --numerics --out {rows}": "exists and is not overwritten",
    "block --model tiny --out {rows}": "is not overwritten",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_it_is_refused_in_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {
        "rows": write(Path("rows.jsonl"), cells(1), [done(one) for one in cells(1)]),
        "other": written(Path("other.jsonl"), [cell(1e-3)]), "link": Path("link"), "toml": Path("some.toml"),
        "gate": Path("gate.json"),
    }  # fmt: skip
    places["link"].symlink_to("rows.jsonl")
    places["toml"].write_text("[model]\n")
    places["gate"].write_bytes(next((ROOT / "configs" / "baselines").rglob("results.json")).read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as stop:
        cli.main(line.format(**places).split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("error: ")) == (EXIT_USAGE, "", 1), err
    assert LINES[line] in err.splitlines()[0]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_whoever_writes_a_file_whole_cannot_replace_a_results_file(tmp_path: Path) -> None:
    """The last guard, of what is written without a look before: figures, pages of notebooks."""
    path = write(tmp_path / "rows.jsonl", cells(1), [done(one) for one in cells(1)])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=RESULTS):
        paths.put(path, b"x")
    assert path.read_bytes() == before
    for text in ("", '{"type": "tuned"}', '[{"type": "header"}]'):
        path.write_text(text)
        paths.put(path, "y")
        assert path.read_text() == "y"
