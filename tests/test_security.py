"""What SECURITY.md claims, claim by claim."""

from __future__ import annotations

import ast
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
from fuzzing import check
from judging import cell, written
from synthetic import record
from test_judge_formats import nvbench
from test_own import RIGHT, write

import flashbench
from flashbench import baselines, judge, runfile
from flashbench._runfile import lines

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'<b>"
STEERING = "a\x1b[2J\x9b31m\x07\u202eb\u200f"
PACKAGE = Path(flashbench.__file__).parent


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def trap(file: str) -> str:
    """The spec of a function whose file leaves a mark when it is imported; a process does so once."""
    return write(f"open('ran', 'w').close()\n{RIGHT}", file)


def test_nothing_can_unpickle_or_evaluate() -> None:
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve", "yaml", "joblib"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not forbidden & {name.name.split(".")[0] for name in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            elif isinstance(node, ast.Name):
                assert node.id not in {"eval", "exec", "execfile"}, path
            elif isinstance(node, ast.Attribute):
                assert node.attr not in {"system", "popen", "unpickle"}, path
            elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


class Mark:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("ran", "w")


def test_an_array_of_objects_is_not_unpickled() -> None:
    numpy.savez("mask.npz", mask=numpy.array([[Mark()]], dtype=object))
    found = check(
        ["io-model", "--block-mask", "mask.npz", "--seqlens", "128", "--models", "flash"], ("mask.npz",)
    )
    assert (found.code, Path("ran").exists()) == (2, False)
    numpy.load("mask.npz", allow_pickle=True)["mask"]
    assert Path("ran").exists(), "else the trap proves nothing"


def test_the_line_runs_what_it_names() -> None:
    assert check(["list", "--impl", trap("line.py")]).code == 0
    assert Path("ran").exists()


def test_bisect_has_no_shell() -> None:
    good = written(Path("good.jsonl"), [cell(1e-3)])
    found = check(["bisect", "--base", good, "--", sys.executable, "-c", "pass", "; touch ran #{out}"])
    assert (found.code, Path("ran").exists()) == (125, False)


def test_a_results_file_imports_nothing() -> None:
    spec = trap("results.py")
    row = record("naive", 16, status="failed", reason="x", dtype="fp32", head_dim=16, batch=1)
    value = json.loads(json.dumps(runfile.record_to_json(row))) | {"config": {"source": spec}}
    value["cell"]["implementation"] = spec
    head = runfile.header(argv=[], options={"impl": spec, "seed": "0"}, environment={}, cells=[])
    Path("o").mkdir()
    Path("o/results.jsonl").write_bytes(lines.seal(head) + lines.seal(value))
    asked = (
        "report",
        "verify",
        "compare o/results.jsonl",
        "history o/results.jsonl",
        "noise",
        "baseline save --name x",
    )
    for command in asked:
        check([*command.split(), "o/results.jsonl"], ("RUNS", "one run", "two sides", "o/results.jsonl"))
    assert check(["run", "--resume", "--out", "o", "--device", "cpu"]).code == 2
    assert not Path("ran").exists()


def test_a_config_imports_only_what_the_line_allows() -> None:
    spec = trap("config.py")
    small = 'seqlens = 16\nhead-dims = 16\ndtypes = "fp32"\npasses = "fwd"\nbatch = 1\nheads = 1\n'
    Path("c.toml").write_text(f'impl = ["{spec}"]\n{small}')
    Path("g.toml").write_text(f'[[cells]]\nimpl = ["{spec}"]\n{small}')
    Path("p.toml").write_text(f'[check]\nimpl = ["{spec}"]\n{small}')
    run = ["run", "--config", "c.toml", "--device", "cpu", "--dry-run"]
    for line in (
        run,
        ["profile", "--trace", "--config", "g.toml"],
        ["gate", "--config", "p.toml", "--out", "o"],
    ):
        found = check(line)
        assert (found.code, Path("ran").exists()) == (2, False), found
        assert all(word in found.err for word in (".toml", spec, "accepted: --impl SPEC"))
    assert check([*run, "--allow-impl"]).code == 0
    assert Path("ran").exists()


def hostile(value: Any, text: str) -> Any:
    """A copy whose texts all end in that one, but those that must be known."""
    if isinstance(value, dict):
        kept = {"type", "dtype", "pass", "status", "flags", "key", "device_type", "io_model", "device_name"}
        return {name: item if name in kept else hostile(item, text) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, text) for item in value]
    return value + text if isinstance(value, str) else value


def written_hostile(text: str) -> None:
    rows = [record(), record("naive"), record("naive", 2048, status="failed", reason="it broke",
    backend="math",
                                              config={"a": "b"},
                                              environment={"device_name": "A" + text})]  # fmt: skip
    written(Path("good.jsonl"), rows, uuid="u", git_commit="c", driver="570")
    found = [lines.parse(line) for line in Path("good.jsonl").read_bytes().splitlines()]
    Path("bad.jsonl").write_bytes(b"".join(lines.seal(hostile(one, text)) for one in found))


def test_no_text_of_a_file_becomes_markup() -> None:
    """Of what is no data, plotly.js and the page's own are all its scripts; no handler, no address."""
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            data = tag == "script" and dict(attributes).get("type") == "application/json"
            seen.append("data" if data else tag)
            for name, value in attributes:
                assert not name.startswith("on"), (tag, name)
                assert name not in ("src", "href") or (value or "#").startswith(("#", "data:")), (tag, value)

    written_hostile(HOSTILE)
    assert check(["report", "bad.jsonl", "-o", "bad.html"]).code == 0
    text = Path("bad.html").read_text()
    Reader().feed(text)
    assert seen.count("script") == 2
    assert "img" not in seen
    assert "<script>alert" not in text
    assert "onerror" in text, "else the attack was never on the page"


@pytest.mark.parametrize("line", ["compare bad.jsonl bad.jsonl --all",
"history bad.jsonl good.jsonl --all", "verify bad.jsonl",
                                  "baseline show x", "baseline list",
                                  "noise bad.jsonl,good.jsonl --out o"])  # fmt: skip
def test_names_steer_no_terminal(line: str) -> None:
    written_hostile(STEERING)
    check(["baseline", "save", "bad.jsonl", "--name", "x"])
    found = check(line.split(), ("RUNS", "bad.jsonl", "two sides"))
    assert not set(STEERING) & set(found.out + found.err) - set("a[2J31mb")


def test_names_in_files_stay_in_their_folder() -> None:
    Path("secret.bin").write_bytes(b"\0" * 100)
    Path("in").mkdir()
    document = nvbench(0.1, Path("in"), samples=True)
    for name in ("../secret.bin", str(Path("secret.bin").absolute()), "x/../../secret.bin"):
        text = json.dumps(document).replace("run/x.json-bin/0.bin", name)
        Path("in/results.json").write_text(text)
        found = check(["compare", "in/results.json", "in/results.json"], ("in/results.json",))
        assert found.code == 4, name
        assert "not beside it" in found.err
    written(Path("good.jsonl"), [cell(1e-3)], device_name="../../../up/\0 x")
    kept = baselines.save(judge.load_side("good.jsonl", "x"), Path("store"), "b", "")
    assert kept.folder.resolve().is_relative_to(Path("store").resolve())
    about = json.loads((kept.folder / baselines.FILE).read_text())
    for name in ("../../../../secret.bin", str(Path("secret.bin").absolute()), ".."):
        (kept.folder / baselines.FILE).write_text(json.dumps(about | {"files": {name: "0" * 64}}))
        assert check(["baseline", "show", "b", "--store", "store"], ("baseline.json", "store")).code == 4
    for name in ("../up", "..", "a/b", ""):
        assert (
            check(["baseline", "save", "good.jsonl", "--name", name, "--store", "store"], ("name",)).code == 2
        )
    assert not Path("up").exists()


def test_what_is_too_much_is_refused() -> None:
    Path("big.toml").write_text("# " + "x" * 2**20)
    Path("deep.toml").write_text("a = " + "[" * 10_000)
    numpy.savez_compressed("bomb.npz", mask=numpy.zeros(2**27, dtype=bool))
    assert Path("bomb.npz").stat().st_size < 2**18
    Path("deep.jsonl").write_text('{"type":' + "[" * 100_000 + "\n")
    for line, code in (
        ("run --config big.toml", 2), ("io-model --gpu big.toml", 2), ("run --config deep.toml", 2),
        ("io-model --block-mask bomb.npz --seqlens 256 --models flash", 2), ("report deep.jsonl", 4),
        ("run --seqlens 1-4096+1 --seqlens-k 1-4096+1 --device cpu", 2),
    ):  # fmt: skip
        found = check(line.split(), ("deep.jsonl", "big.toml", "bomb.npz"))
        assert found.code == code, found
