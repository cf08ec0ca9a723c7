"""A function of one's own is a row like any other, and what is wrong with it is one clear line."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from attention import exact, featured, problem, run
from tiers import tiers

import flashbench
from flashbench import declared, iomodel, kernels, runfile, table
from flashbench.cli import main
from flashbench.errors import FlashbenchError, SpecError, UnknownName
from flashbench.kernels import Misbehaviour, Refusal, Target, _own
from flashbench.kernels._inputs import make_inputs

CPU = Target()
RIGHT = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def attention(q, k, v, causal=False, scale=None, enable_gqa=False):
    return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
"""
GRID = ["--seqlens", "16", "--head-dims", "8", "--heads", "2", "--batch", "1", "--dtypes", "fp32"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and a registry and modules that forget what a test loads."""
    monkeypatch.chdir(tmp_path)
    found = dict(kernels.registry())
    monkeypatch.setattr(kernels, "registry", lambda: found)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("flashbench_own_") or name == "mine":
            del sys.modules[name]


def write(text: str, name: str = "mine.py") -> str:
    Path(name).write_text(text)
    return f"{name}:attention"


def flashbench_(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    return int(stop.value.code or 0)


def rows(folder: str) -> dict[tuple[str, str], Any]:
    found = runfile.load(Path(folder) / "results.jsonl").records
    return {(one.cell.implementation, one.cell.pass_): one for one in found}


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ("mine.py:attention", "--no-in-process"),
        pytest.param("mine:attention", "--no-in-process", marks=pytest.mark.slow),
        ("mine.py:attention", "--in-process"),
        ("mine:attention", "--in-process"),
    ],
)
def test_run_measures_it_beside_the_rest_and_the_row_names_its_source(spec: str, where: str) -> None:
    write(RIGHT)
    line = ["run", where, "--impl", spec, "--impls", "naive", *GRID, "--causal", "no", "-q", "--out", "o"]
    assert flashbench_(*line) == 0
    found = rows("o")
    assert set(found) == {(name, pass_) for name in ("naive", spec) for pass_ in ("fwd", "bwd")}
    for one in found.values():
        assert one.status == "ok", one.reason
    config = found[spec, "bwd"].config
    assert config["source"] == spec
    assert len(config["source_sha256"]) == 16
    assert spec in Path("o/report.html").read_text()


def test_without_impls_run_adds_it_to_the_default_and_check_takes_it_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = write(RIGHT)
    assert flashbench_("run", "--impl", spec, *GRID, "--dry-run", "--json", "-q") == 0
    planned = capsys.readouterr().out
    assert "naive" in planned
    assert spec in planned
    assert (
        flashbench_("check", "--impl", spec, *GRID, "--causal", "no", "--passes", "fwd", "--json", "-q") == 0
    )
    assert {row["implementation"] for row in json.loads(capsys.readouterr().out)} == {spec}


@pytest.mark.parametrize("command", ["run", "check", "profile"])
def test_impls_none_leaves_it_alone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write(RIGHT)
    more = {"run": ["--dry-run", "--json", "-q"], "check": ["--json", "-q"], "profile": ["--trace", "--json"]}
    flashbench_(command, "--impls", "none", *GRID, "--causal", "no", *more[command])
    assert (
        "--impls 'none': nothing is left; accepted: names, or none beside --impl" in capsys.readouterr().err
    )
    flashbench_(command, "--impl", spec, "--impls", "none", *GRID, "--causal", "no", *more[command])
    out, err = capsys.readouterr()
    assert spec in out + err
    assert "naive" not in out
    assert "nothing is left" not in err


def test_a_resumed_run_measures_again_what_was_of_another_source(capsys: pytest.CaptureFixture[str]) -> None:
    spec = write(RIGHT.replace("return sdpa", "return 2 * sdpa"))
    again = ["run", "--in-process", "--impl", spec, "--out", "o"]
    assert flashbench_(*again, "--impls", "naive", *GRID, "--causal", "no", "-q") == 0
    before = rows("o")
    assert before[spec, "fwd"].status == "wrong"
    assert flashbench_(*again, "--resume", "-q") == 0
    assert rows("o") == before
    for name in [name for name in sys.modules if name.startswith("flashbench_own_")]:
        del sys.modules[name]  # as in a new process
    del kernels.registry()[spec]
    write(RIGHT)
    assert flashbench_(*again, "--resume") == 0
    assert "2 rows are of another source than now and are measured again" in capsys.readouterr().err
    after = rows("o")
    assert after[spec, "fwd"].status == after[spec, "bwd"].status == "ok"
    assert after["naive", "fwd"] == before["naive", "fwd"]
    assert after[spec, "fwd"].config != before[spec, "fwd"].config


@pytest.mark.parametrize(
    ("text", "spec", "said"),
    [
        (RIGHT, "mine.py", "not a function; accepted: FILE.py:FUNCTION or MODULE:FUNCTION"),
        (RIGHT, "other.py:attention", "there is no file other.py"),
        (RIGHT, "mi-ne:attention", "'mi-ne' is no module"),
        (RIGHT, "no_such:attention", "raised ModuleNotFoundError: No module named 'no_such'"),
        (RIGHT, "mine.py:attentoin", "has no 'attentoin'; did you mean 'attention'?"),
        ("x = 1\nx / 0\n", None, "importing it raised ZeroDivisionError: division by zero (mine.py:2)"),
        (
            "class Bad(Exception):\n    def __str__(self):\n        raise ValueError(\"no\")\nraise Bad",
            None,
            "importing it raised Bad: its message could not be made (mine.py:4)",
        ),
        ("raise SystemExit(3)", None, "importing it raised SystemExit: 3"),
        ("def attention(:", None, "importing it raised SyntaxError: invalid syntax (mine.py, line 1)"),
        ("attention = 3", None, "it is int; accepted:"),
        ("def attention(q, k): ...", None, "it takes 2 arguments"),
        ("def attention(q, k, v, blocks): ...", None, "'blocks' is not known and has no default"),
        ("import flashbench\n@flashbench.implementation(layout='sbhd')\ndef attention(q, k, v): ...", None,
         "layout 'sbhd' is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line_that_says_why(
    text: str, spec: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec or "mine.py:attention"
    write(text)
    command = {"x": ["check"], "d": ["profile", "--trace"]}.get(text[0], ["run"])
    assert flashbench_(*command, "-q", *GRID, "--impl", spec) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith(f"error: --impl '{spec}'")
    assert said in error


def loaded(function: Any) -> kernels.Implementation:
    source = _own._Source("mine.py:f", lambda: function, "mine.py:f", "--impl mine.py:f")
    return _own._implementation(source, "")


def causal_sdpa(q: Any, k: Any, v: Any, is_causal: bool = False, sm_scale: float | None = None) -> Any:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    return sdpa(q, k, v, is_causal=is_causal, scale=sm_scale)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("memory", ["bhsd", "bshd"])
def test_it_gets_the_layout_that_it_declares_contiguous(layout: str, memory: str) -> None:
    seen = []

    @flashbench.implementation(layout=layout)
    def f(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        seen.append((tuple(q.shape), q.is_contiguous()))
        swap = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)
        return swap(causal_sdpa(swap(q), swap(k), swap(v), is_causal))

    row, p = loaded(f), problem(layout=memory)
    reason = row.why_unsupported(p, "bwd", CPU)
    assert (reason is None) == (layout == "bshd" or memory == "bhsd")
    inputs = make_inputs(p, "cpu", 3)
    for mine, theirs in zip(run(row, p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-6)
    shape = (2, 4, 16, 8) if layout == "bhsd" else (2, 16, 4, 8)
    assert set(seen) == {(shape, True)}


def test_the_signature_says_what_it_takes_and_the_rest_is_refused_by_name() -> None:
    def f(q: Any, k: Any, v: Any, causal: Any, window_size: Any = None, softcap: Any = None) -> Any: ...

    row = loaded(f)
    for feature in ("window", "softcap"):
        assert row.why_unsupported(featured(feature), "fwd", CPU) is None
    for feature in ("alibi", "bias", "sinks", "dropout", "varlen", "block-mask", "bshd"):
        assert row.why_unsupported(featured(feature), "fwd", CPU) == f"it does not take {feature}"
    assert row.why_unsupported(featured("deterministic"), "fwd", CPU) is None
    assert row.why_unsupported(featured("deterministic"), "bwd", CPU) == "it does not take deterministic"
    plain = loaded(lambda q, k, v: q)
    assert plain.why_unsupported(problem(), "fwd", CPU) == "its signature has no causal or is_causal"
    assert plain.why_unsupported(problem(causal=False), "fwd", CPU) is None


def test_the_declaration_refuses_in_its_own_words() -> None:
    def supports(p: Any, pass_: str) -> Any:
        return p.head_dim <= 64 or ("head dims up to 64" if pass_ == "fwd" else False)

    @flashbench.implementation(passes=("fwd", "bwd"), dtypes="fp16", supports=supports, features="softcap")
    def f(q: Any, k: Any, v: Any, causal: bool = False) -> Any: ...

    row, big = loaded(f), {"head_dim": 128, "head_dim_v": 128, "dtype": "fp16"}
    assert row.why_unsupported(problem(dtype="fp16"), "bwd", CPU) is None
    assert row.why_unsupported(featured("softcap", dtype="fp16"), "bwd", CPU) is None
    assert row.why_unsupported(problem(), "bwd", CPU) == "it declares the dtype fp16 alone, not fp32"
    assert (row.why_unsupported(problem(**big), "fwd+bwd", CPU) or "").startswith(
        "it declares the pass fwd, bwd"
    )
    assert row.why_unsupported(problem(**big), "fwd", CPU) == "head dims up to 64"
    assert row.why_unsupported(problem(**big), "bwd", CPU) == "its supports(problem, pass_) says no"
    raising = loaded(flashbench.implementation(supports=lambda p, pass_: 1 / 0)(f))
    said = "its supports(problem, pass_) raised ZeroDivisionError: division by zero"
    assert raising.why_unsupported(problem(), "fwd", CPU) == said


class _Unshown:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("said", [None, 0, 1, ["no"], _Unshown()])
def test_supports_that_answers_neither_yes_nor_no_is_no_yes(said: Any) -> None:
    @flashbench.implementation(supports=lambda problem, pass_: said)
    def f(q: Any, k: Any, v: Any, causal: bool = False) -> Any: ...

    shown = "a value of _Unshown" if isinstance(said, _Unshown) else repr(said)
    why = f"its supports(problem, pass_) returned {shown}; accepted: True, or why not as text"
    assert loaded(f).why_unsupported(problem(), "fwd", CPU) == why


def test_every_argument_that_it_asks_for_is_what_the_problem_says() -> None:
    seen: dict[str, Any] = {}

    def f(q: Any, k: Any, v: Any, causal: Any = None, window: Any = None, softcap: Any = None,
          alibi_slopes: Any = None, bias: Any = None, sinks: Any = None,
          scale: Any = None) -> Any:  # fmt: skip
        seen.update(locals())
        return q + 0

    p = featured("window", "softcap", "alibi", "bias", "sinks", causal=True)
    inputs = make_inputs(p, "cpu", 0)
    loaded(f).prepare(p, inputs)()
    assert seen["causal"] is True
    assert (seen["window"], seen["softcap"], seen["scale"]) == ((3, 2), 1.5, p.softmax_scale)
    for name in ("alibi_slopes", "bias", "sinks"):
        assert torch.equal(seen[name], getattr(inputs, name))


def test_a_packed_batch_in_bshd_has_no_leading_one() -> None:
    @flashbench.implementation(layout="bshd")
    def f(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any) -> Any:
        assert (q.shape, k.shape, max_seqlen_q) == ((26, 4, 8), (31, 4, 8), 16)
        return q + 0

    p = featured("varlen", causal=False)
    row, inputs = loaded(f), make_inputs(p, "cpu", 0)
    assert row.why_unsupported(p, "fwd", CPU) is None
    assert torch.equal(row.prepare(p, inputs)(), inputs.q)


def _scales(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    q.mul_(2)
    return q + 0


def _writes_beside_torch(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    v.detach().numpy()[0, 0, 0, 0] += 1  # as a kernel does, which torch does not see
    return q + 0


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (_scales, Misbehaviour, "it changes its input q"),
        (_writes_beside_torch, Misbehaviour, "it changes its input v"),
        (lambda q, k, v, causal: (q, None), Misbehaviour, "it returns tuple; wanted: o alone"),
        (lambda q, k, v, causal: q.double(), Misbehaviour, "its o is torch.float64"),
        (lambda q, k, v, causal: q[:, :1], Misbehaviour, "its o has the shape (2, 1, 16, 8)"),
        (lambda q, k, v, causal: q.transpose(1, 2), Misbehaviour, "implementation(layout='bshd')"),
        (lambda q, k, v, causal: q * 2, Misbehaviour, "its o has no gradient of k, v"),
        (lambda q, k, v, causal: v.sigmoid(), Misbehaviour, "its o has no gradient of q, k"),
    ],
)  # fmt: skip
def test_what_it_does_wrong_is_said_and_no_one_elses_inputs_change(
    function: Any, kind: type[Exception], said: str
) -> None:
    row, p = loaded(function), problem()
    inputs = make_inputs(p, "cpu", 0).detached(grad="gradient" in said)
    before = [x.clone() for x in (*inputs.leaves, inputs.dout)]
    with pytest.raises(kind) as error:
        row.prepare(p, inputs)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    for x, y in zip(before, (*inputs.leaves, inputs.dout), strict=True):
        assert torch.equal(x, y)


LATE = "calls = 0\n" + RIGHT.replace(
    "    return ",
    "    global calls\n    calls += 1\n    if calls >= FROM:\n        k.detach().mul_(1.01)\n    return ",
)
LATE_ROWS_FIRST = LATE.replace("sdpa(q, k, v,", "sdpa(*(x.transpose(1, 2) for x in (q, k, v)),").replace(
    "enable_gqa=enable_gqa)", "enable_gqa=enable_gqa).transpose(1, 2)"
).replace("def ", "import flashbench\n@flashbench.implementation(layout='bshd')\ndef ")  # fmt: skip


@pytest.mark.parametrize("text", [LATE, LATE_ROWS_FIRST], ids=["as it lies", "copied for it"])
@pytest.mark.parametrize("since", [3, 4])
@pytest.mark.parametrize("others", ["sdpa-cudnn", "naive"], ids=["alone", "beside one"])
def test_inputs_that_change_only_after_the_check_are_noticed(text: str, since: int, others: str) -> None:
    """The first two calls are checked, the third shows the memory, and the rest is timed."""
    spec = write(text.replace("FROM", str(since)))
    line = ["run", "--in-process", "--impl", spec, *GRID, "--causal", "no", "--passes", "fwd", "-q"]
    flashbench_(*line, "--impls", others, "--out", "o")
    found = rows("o")
    late = found.pop((spec, "fwd"))
    assert (late.status, late.samples) == ("wrong", None)
    assert late.reason == "it changes its input k; an attention leaves its inputs as they are"
    assert [one.status for one in found.values()] == ["ok" if others == "naive" else "unavailable"]
    if since > 3 and text == LATE:
        why = "one of them changed its input k" if others == "naive" else None
        assert [one.timing.get("alone_because") for one in found.values()] == [why]


ROWS_FIRST = RIGHT.replace("sdpa(q, k, v,", "sdpa(*(x.transpose(1, 2) for x in (q, k, v)),").replace(
    "enable_gqa=enable_gqa)", "enable_gqa=enable_gqa).transpose(1, 2)"
)
DECLARED = "import flashbench\n@flashbench.implementation(layout='bhsd')\ndef "
TOLD = "rows first: @flashbench.implementation(layout='bshd')"


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        (ROWS_FIRST, "wrong", True),
        (ROWS_FIRST.replace("def ", DECLARED.replace("bhsd", "bshd")), "ok", False),
        (RIGHT.replace("return ", "return 2 * "), "wrong", True),
        (RIGHT.replace("return ", "return 2 * ").replace("def ", DECLARED), "wrong", False),
    ],
)  # fmt: skip
def test_a_wrong_result_says_what_layout_it_was_given_unless_one_was_declared(
    text: str, status: str, told: bool
) -> None:
    """With one head rows and heads may be swapped without a wrong shape."""
    line = ["run", "--in-process", "--impl", write(text), "--impls", "naive", *GRID, "--causal", "no", "-q"]
    assert flashbench_(*line, "--heads", "1", "--passes", "fwd", "--out", "o") == 0
    row = rows("o")["mine.py:attention", "fwd"]
    assert row.status == status, row.reason
    assert (TOLD in (row.reason or "")) == told


@pytest.mark.parametrize("memory", ["bhsd", "bshd"])
def test_changed_inputs_show_in_a_layout_that_was_made_for_it_too(memory: str) -> None:
    @flashbench.implementation(layout="bshd")
    def f(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return _scales(q, k, v)

    p = problem(layout=memory)
    with pytest.raises(Misbehaviour, match="it changes its input q"):
        loaded(f).prepare(p, make_inputs(p, "cpu", 0))


def test_a_forward_without_gradient_is_no_backward_rather_than_a_failure() -> None:
    row, p = (
        loaded(lambda q, k, v, causal: causal_sdpa(q.detach(), k.detach(), v.detach(), causal)),
        problem(),
    )
    inputs = make_inputs(p, "cpu", 0).detached(grad=True)
    with pytest.raises(Refusal, match="it has a forward only"):
        row.prepare(p, inputs)
    assert row.prepare(p, inputs.detached(grad=False))().shape == inputs.q.shape


MODELLED = (
    RIGHT
    + """
import flashbench

def traffic(p, pass_):
    return {"read": {"q": 100, "k": 20}, "write": 3, "flops": 7, "extra_bytes": 11}

attention = flashbench.implementation(io_model=traffic, config={"block": 5})(attention)
"""
)


def test_a_model_of_its_author_fills_the_model_columns() -> None:
    spec = write(MODELLED)
    line = [
        "run",
        "--in-process",
        "--impl",
        spec,
        "--impls",
        "naive",
        *GRID,
        "--causal",
        "no",
        "--passes",
        "fwd",
        "--out",
        "o",
    ]
    assert flashbench_(*line, "-q") == 0
    found = {row["implementation"]: row for row in table.rows(table.build([runfile.load("o/results.jsonl")]))}
    row = found[spec]
    assert row["requested_bytes"] == 123
    assert row["done_flops"] == 7
    assert row["config"].startswith("block=5 source=")
    assert found["naive"]["requested_bytes"] > 1000


def test_a_named_model_is_that_row(capsys: pytest.CaptureFixture[str]) -> None:
    spec = write(
        RIGHT + "attention.__flashbench__ = __import__('flashbench').declared.Declared(io_model='flash-v2')"
    )
    assert flashbench_("list", "implementations", "--impl", spec, "--json") == 0
    assert kernels.get(spec).model(problem(), CPU) == "flash-v2"
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == spec)
    assert (row["available"], row["mode"], row["io_model"]) == (True, "timed", "flash-v2")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"reads": 3},
            " gives 'reads'; accepted: flops, exps, extra_bytes, saved_bytes, read, write, atomic",
        ),
        ({3: 3}, " gives 3; accepted: flops,"),
        ({"read": -1}, ": read of all is -1; accepted: a whole number from 0 to"),
        ({"flops": 1.5}, ": flops is 1.5; accepted: a whole number"),
        ({"read": float("nan")}, ": read of all is nan; accepted: a whole number"),
        ({"write": {"o": float("inf")}}, ": write of o is inf; accepted: a whole number"),
        ({"flops": 10**400}, ": flops is 1000"),
        ({"exps": "3"}, ": exps is '3'; accepted: a whole number"),
        ({"flops": None}, ": flops is None; accepted: a whole number"),
        (None, " returned None; accepted: a dict of flops, exps,"),
        (3, " returned 3; accepted: a dict of"),
        ([("read", 3)], " returned [('read', 3)]; accepted: a dict of"),
    ],
)
def test_a_model_that_is_no_model_says_so(values: Any, said: str) -> None:
    row = loaded(flashbench.implementation(io_model=lambda p, pass_: values)(lambda q, k, v: q))
    with pytest.raises(Misbehaviour) as error:
        row.stated(problem(), "fwd")
    assert str(error.value).startswith(f"the io_model of mine.py:f{said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ("None", "the io_model of mine.py:attention returned None; accepted: a dict of flops,"),
        ("{'read': float('nan')}", "the io_model of mine.py:attention: read of all is nan; accepted:"),
        ("p.heads", "the io_model of mine.py:attention raised AttributeError: 'Problem' object has no"),
    ],
)
def test_a_row_whose_model_gives_no_bytes_is_wrong_and_names_the_model(returns: str, said: str) -> None:
    text = MODELLED.replace(
        '{"read": {"q": 100, "k": 20}, "write": 3, "flops": 7, "extra_bytes": 11}', returns
    )
    line = ["run", "--in-process", "--impl", write(text), "--impls", "naive", *GRID, "--causal", "no", "-q"]
    assert flashbench_(*line, "--passes", "fwd", "--out", "o") == 0
    found = rows("o")
    row = found["mine.py:attention", "fwd"]
    assert row.status == "wrong"
    assert (row.reason or "").startswith(said)
    assert ("(mine.py:" in (row.reason or "")) == ("raised" in said)
    assert found["naive", "fwd"].status == "ok"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"layouts": "bhsd"}, SpecError), ({"layout": "x"}, UnknownName), ({"passes": "back"}, UnknownName),
        ({"dtypes": ("fp12",)}, UnknownName), ({"features": "windows"}, UnknownName),
        ({"io_model": "flash-v9"}, UnknownName), ({"dtypes": ["fp32", "fp12"]}, UnknownName),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_is_refused_where_it_stands(
    fields: dict[str, Any], kind: type[FlashbenchError]
) -> None:
    with pytest.raises(kind):
        flashbench.implementation(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"config": 3}, "config is 3; accepted: a dict of names, each text, a number, true or false"),
        ({"config": {"blocks": (128, 64)}},
         "config['blocks'] is (128, 64); accepted: text, a number, true or false"),
        ({"config": {"blocks": [[1]]}}, "config['blocks'] is [[1]]; accepted: text,"),
        ({"config": {"scale": float("nan")}}, "config['scale'] is nan; accepted: text,"),
        ({"config": {"scale": 10**30}}, "config['scale'] is 1000"),
        ({"config": {"x": _Unshown()}}, "config['x'] is a value of _Unshown; accepted: text,"),
        ({"config": {3: "x"}}, "a name in config is 3; accepted: text"),
        ({"passes": ()}, "passes is (); accepted: names among fwd, bwd, fwd+bwd, one or more; None for all"),
        ({"dtypes": []}, "dtypes is []; accepted: names among fp16,"),
        ({"layout": None}, "layout is None; accepted: bhsd or bshd"),
        ({"passes": 3}, "passes is 3; accepted: names among fwd, bwd"),
        ({"passes": ("fwd", None)}, "passes is ('fwd', None); accepted: names among"),
        ({"dtypes": 16}, "dtypes is 16; accepted: names among fp16,"),
        ({"features": None}, "features is None; accepted: names among"),
        ({"supports": "fwd"}, "supports is 'fwd'; accepted: a function (problem, pass_)"),
        ({"io_model": 3}, "io_model is 3; accepted: a row of 'flashbench list models' or a function"),
        ({"triton": "yes"}, "triton is 'yes'; accepted: True, False or None"),
    ],
)  # fmt: skip
def test_a_field_that_holds_what_it_cannot_is_named_with_its_value(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        flashbench.implementation(**fields)
    assert str(error.value).startswith(f"implementation(): {said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "model"),
    [("linformer:rank=64", "linformer:rank=64"), ("linformer: rank=256", "linformer"), ("flash-v2",) * 2],
)
def test_models_that_io_model_takes_are_declared_by_the_same_words(given: str, model: str) -> None:
    spec = write(
        RIGHT.replace("def ", f"import flashbench\n@flashbench.implementation(io_model={given!r})\ndef ")
    )
    line = ["run", "--in-process", "--impl", spec, "--impls", "none", *GRID, "--causal", "no", "-q"]
    assert flashbench_(*line, "--out", "o") == 0
    found = {row["pass"]: row for row in table.rows(table.build([runfile.load("o/results.jsonl")]))}
    assert {one.io_model for one in rows("o").values()} == {model}
    for pass_, row in found.items():
        assert row["status"] == "ok"
        assert (row["requested_bytes"] is None) == (pass_ == "bwd" and model != "flash-v2")
    with pytest.raises(FlashbenchError, match="rank"):
        flashbench.implementation(io_model="linformer:rank=0")


@pytest.mark.parametrize("given", ["bhsd", len, {"layout": "bhsd"}])
def test_what_takes_no_declaration_is_told_so(given: Any) -> None:
    for declare in (flashbench.implementation, flashbench.implementation(passes="fwd")):
        with pytest.raises(SpecError, match=r"takes no declaration; accepted: a function of \(q, k, v\)"):
            declare(given)


def test_the_decorator_without_brackets_declares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    spec = write(RIGHT.replace("def ", "import flashbench\n@flashbench.implementation\ndef "))
    line = ["check", "--impl", spec, *GRID, "--causal", "no", "--passes", "fwd", "--json", "-q"]
    assert flashbench_(*line) == 0
    assert [row["status"] for row in json.loads(capsys.readouterr().out)] == ["checked"]


CONFIGURED = RIGHT.replace("def ", "import flashbench\n@flashbench.implementation(config=CONFIG)\ndef ")


@pytest.mark.parametrize(
    ("config", "accepted"),
    [
        ("{'blocks': (128, 64)}", "text, a number, true or false"),
        ("3", "a dict of names, each text, a number, true or false"),
        ("{'fwd_block_q': 'x'}", "a whole number, 1 to 2147483647"),
        ("{'fwd_block_q': -2.5}", "a whole number, 1 to 2147483647"),
        ("{'block_k': None}", "a whole number, 1 to 2147483647"),
        ("{'block_q': 2**62}", "a whole number, 1 to 2147483647"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_config_that_no_file_could_give_back_ends_no_run(
    command: str, config: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before anything is measured; what a declaration took is what the file holds."""
    assert flashbench_(command, "--impl", write(CONFIGURED.replace("CONFIG", config)), *GRID, "-q") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("error: --impl 'mine.py:attention': importing it raised SpecError: ")
    assert f"; accepted: {accepted} (mine.py:" in error


@pytest.mark.parametrize(
    "tiles",
    ["{'fwd_block_q': 128, 'fwd_block_k': 1}", "{'block_q': 2**31 - 1}", "{'block_n': 'x', 'warps': 4.5}"],
)
def test_a_config_is_read_back_as_it_was_declared(tiles: str) -> None:
    """Also where nothing of its named model follows from it, and where it was changed since."""
    text = CONFIGURED.replace("config=CONFIG", "io_model='flash-v2', config=CONFIG, passes='fwd'")
    text = text.replace("CONFIG", "SHARED").replace("import torch", f"SHARED = {tiles}")
    spec = write(text + "SHARED['late'] = ((1, 2),)\n")
    line = ["run", "--in-process", "--impl", spec, "--impls", "naive", *GRID, "--causal", "no", "-q"]
    assert flashbench_(*line, "--passes", "fwd", "--out", "o") == 0
    row = rows("o")[spec, "fwd"]
    assert row.status == "ok", row.reason
    assert {name: row.config[name] for name in row.config if "source" not in name} == eval(tiles)


def test_a_declaration_leaves_the_function_as_it_is() -> None:
    def f(q: Any, k: Any, v: Any) -> Any: ...

    assert flashbench.implementation(passes="fwd")(f) is f
    assert declared.of(f).passes == ("fwd",)
    assert flashbench.implementation(f, passes="bwd") is f
    assert declared.of(f).passes == ("bwd",)
    assert flashbench.implementation(f) is f
    assert declared.of(f) == declared.Declared()
    assert declared.of(len) == declared.Declared()


def test_pairs_of_features_are_checked_of_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    spec = write(
        "def attention(q, k, v, causal=False, scale=None, softcap=0.0, enable_gqa=False):\n"
        "    import torch\n"
        "    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale\n"
        "    s = softcap * torch.tanh(s / softcap) if softcap else s\n"
        "    if causal:\n"
        "        seen = torch.ones(s.shape[2:], dtype=torch.bool).tril(s.shape[3] - s.shape[2])\n"
        "        s = s.masked_fill(~seen, float('-inf'))\n"
        "    return s.softmax(-1).nan_to_num(0) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)\n"
    )
    assert flashbench_("check", "--pairs", "--impl", spec, "--dtypes", "fp32", "--json") == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert {row["implementation"] for row in rows} == {spec}
    assert {bool(row["softcap"]) for row in rows} == {True, False}
    assert not any(row["alibi"] or row["bias"] or row["block_mask"] for row in rows)
    assert f"{spec}: " in err


def test_what_launches_no_triton_is_not_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert flashbench_("profile", "--trace", "--impl", write(RIGHT), *GRID, "--json") == 3
    assert "mine.py:attention launched no Triton kernel: nothing to interpret" in capsys.readouterr().err


def test_packages_offer_functions_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    write(RIGHT)
    entries = [
        EntryPoint("theirs", "mine:attention", _own.GROUP), EntryPoint("broken", "no_such:f", _own.GROUP),
    ]  # fmt: skip
    monkeypatch.setattr(_own.importlib.metadata, "entry_points", lambda group: entries)
    theirs, broken = _own.offered()
    assert theirs.why_unavailable(CPU) is None
    p = problem()
    inputs = make_inputs(p, "cpu", 1)
    assert torch.allclose(run(theirs, p, inputs)[0].double(), exact(p, inputs)[0], atol=2e-6)
    why = broken.why_unavailable(CPU) or ""
    assert why.startswith("--impls broken (entry point 'no_such:f'): importing it raised ModuleNotFoundError")
    assert (theirs.origin.facts()["source"], broken.origin.facts()) == (
        "mine:attention",
        {"source": "no_such:f"},
    )
    kernels.registry().update({row.name: row for row in (theirs, broken)})
    line = ["run", "--in-process", "--impls", "theirs,broken", *GRID, "--causal", "no", "-q", "--out", "o"]
    assert flashbench_(*line) == 0
    assert {key[0]: one.status for key, one in rows("o").items()} == {"theirs": "ok", "broken": "unavailable"}


NOISY = (
    "import ctypes, os, sys\n"
    + RIGHT
    + """
from flashbench import implementation

def noise(what):
    print(what, "by Python")
    sys.__stdout__.write(what + " by its first stdout\\n")
    os.write(1, (what + " by the system\\n").encode())
    ctypes.CDLL(None).puts((what + " by C").encode())
    os.system(f"echo {what} by a program")

noise("import noise")

def traffic(problem, pass_):
    noise("model noise")
    return {}

def supports(problem, pass_):
    noise("limit noise")
    return True

@implementation(io_model=traffic, supports=supports)
def noisy(q, k, v, causal=False, scale=None, enable_gqa=False):
    noise("call noise")
    return attention(q, k, v, causal, scale, enable_gqa)
"""
)


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["check", "--json"], "import limit model call"),
        (["check", "--csv"], "import limit model call"),
        (["run", "--in-process", "--impls", "naive", "--json"], "import limit model call"),
        (["run", "--in-process", "--impls", "naive", "--dry-run", "--json"], "import limit"),
        (["list", "implementations", "--json"], "import"),
        *tiers([], [(["run", "--impls", "naive", "--json"], "import")]),
    ],
)  # fmt: skip
def test_what_a_function_prints_is_no_part_of_the_results(
    command: list[str], asked: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """asked: what of it runs in the command's own process."""
    write(NOISY)
    grid = [] if command[0] == "list" else [*GRID, "--causal", "no", "--passes", "fwd", "-q"]
    assert flashbench_(*command, "--impl", "mine.py:noisy", *grid) == 0
    print("and stdout is what it was")
    out, err = capfd.readouterr()
    assert "noise" not in out
    assert out.endswith("and stdout is what it was\n")
    out = out.removesuffix("and stdout is what it was\n")
    if "--json" in command:
        assert json.loads(out)
    else:
        assert out.startswith("implementation,")
    for what in asked.split():
        for by in ("Python", "its first stdout", "the system", "C", "a program"):
            assert f"{what} noise by {by}\n" in err


def test_what_its_model_prints_is_no_result_whoever_asks_it(capfd: pytest.CaptureFixture[str]) -> None:
    write(NOISY)
    assert kernels.get("mine.py:noisy").stated(problem(), "fwd") == iomodel.stated_numbers("noisy", {})
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("model noise") == 5


def test_the_template_is_right_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert flashbench_("new-impl", "mine.py") == 0
    assert flashbench_("new-impl", "mine.py") == 2
    assert "is there already" in capsys.readouterr().err
    grid = ["--seqlens", "1,33", "--seqlens-k", "7,33", "--head-dims", "16", "--dtypes", "fp32"]
    assert flashbench_("check", "--impl", "mine.py:attention", *grid, "--json", "-q") == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"checked"}


@pytest.mark.parametrize("triton", [[], ["--triton"]], ids=["torch", "triton"])
@pytest.mark.parametrize("name", ["a b.py", "it's.py", 'a"""b.py', "a\\n$HOME.py", "{spec}.py"])
def test_what_new_impl_says_to_run_is_what_a_shell_takes(
    name: str, triton: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flashbench_("new-impl", name, *triton) == 0
    said = capsys.readouterr().err.partition("check it: ")[2]
    line = ["flashbench", "check", "--impl", f"{name}:attention"]
    assert shlex.split(said) == line
    module = ast.parse(Path(name).read_text())
    [told] = [line for line in (ast.get_docstring(module) or "").splitlines() if "flashbench check" in line]
    assert shlex.split(told)[:4] == line
    assert flashbench_("list", "implementations", *line[2:], "--json") == 0
    assert f"{name}:attention" in [row["name"] for row in json.loads(capsys.readouterr().out)]


def test_the_triton_template_is_right_and_traced_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := kernels.get("flash").why_unavailable(CPU):
        pytest.skip(reason)
    assert flashbench_("new-impl", "mine.py", "--triton") == 0
    text = Path("mine.py").read_text()
    write(text.replace("    o = torch.empty_like(q)", "    print('noise')\n    o = torch.empty_like(q)"))
    spec, grid = "mine.py:attention", ["--seqlens", "33", "--head-dims", "16", "--dtypes", "fp32"]
    assert flashbench_("check", "--impl", spec, *grid, "--passes", "fwd", "--json", "-q") == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"checked"}
    grid += ["--heads", "2", "--kv-heads", "1", "--causal", "no", "--passes", "fwd", "--json"]
    assert flashbench_("profile", "--trace", "--impl", spec, *grid) == 0
    [traced] = json.loads(capsys.readouterr().out)
    moved = {
        row["tensor"]: (row["read_bytes"], row["write_bytes"]) for row in traced["kernels"][0]["tensors"]
    }
    # one tile of queries per head, two of keys: every head reads all of K and V once
    head = 33 * 16 * 4
    assert moved == {"q": (2 * head, 0), "k": (2 * head, 0), "v": (2 * head, 0), "o": (0, 2 * head)}
    assert (traced["difference_bytes"], traced["total"]["read_bytes"]) == (None, 6 * head)
