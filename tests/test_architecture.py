"""The layers, the import hygiene and the sizes that docs/architecture.md states hold in the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashbench"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [
    {"aside", "errors", "installed", "paths", "signals", "units", "userdata"},
    {
        "problem",
        "block_masks",
        "named_masks",
        "devices",
        "devicefile",
        "links",
        "presets",
        "configfile",
        "ceilings",
        "flash_configs",
        "decode_configs",
        "hopper_configs",
    },
    {
        "sweep",
        "features",
        "covering",
        "decode_cases",
        "declared",
        "iomodel",
        "_iomodel",
        "crossover",
        "kvcache",
        "record",
        "record_json",
        "record_shape",
    },
    {"kernels"},
    {"profilers", "_profilers", "environment"},
    {
        "runner",
        "_runner",
        "isolation",
        "fleet",
        "runfile",
        "_runfile",
        "plan",
        "calibrate",
        "_calibrate",
        "counting",
        "tracing",
        "numerics",
        "decoding",
        "blocks",
        "ring",
        "tuned",
        "tuning",
        "gating",
        "launched",
    },
    {
        "metrics",
        "table",
        "whatif",
        "compared",
        "judge",
        "baselines",
        "spending",
        "unstarted",
        "claim",
        "claims",
    },
    {"console", "fitted", "report"},
    {"cli", "_cli", "__main__", "api", "flash_attn"},
]
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH_FREE = {"aside", "errors", "installed", "paths", "units", "problem", "block_masks", "named_masks",
              "devices", "devicefile", "links", "presets", "ceilings", "configfile", "sweep",
              "iomodel", "_iomodel", "kvcache", "record", "record_json", "record_shape", "runfile",
              "metrics", "table", "whatif",
              "console", "report", "flash_configs", "decode_configs", "hopper_configs",
              "features", "covering", "decode_cases", "declared"}  # fmt: skip
NO_KERNELS = {"runfile", "metrics", "table", "report", "console"}
LINES_PER_MODULE = 400
LINES_PER_FUNCTION = 60
LINES_PER_KERNEL = 150
PARAMETERS = 8


def part(path: Path) -> str:
    """The top-level module or package below flashbench/ that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(dotted name, line, inside a function or TYPE_CHECKING) of every import in a file."""
    found = []

    def visit(node: ast.AST, deferred: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno, deferred) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: relative import"
                module = child.module or ""
                if module == "flashbench":
                    found.extend(
                        (f"flashbench.{alias.name}", child.lineno, deferred) for alias in child.names
                    )
                else:
                    found.append((module, child.lineno, deferred))
            visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def functions(path: Path) -> list[ast.FunctionDef]:
    """Every function in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def is_kernel(function: ast.FunctionDef) -> bool:
    """True for a Triton or Gluon jit function."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_lower_layers_only(path: Path) -> None:
    me = part(path)
    if me == "__init__":
        return
    assert me in LAYER, f"{me} has no layer: add it to LAYERS and to docs/architecture.md"
    for name, line, _ in imports(path):
        if not name.startswith("flashbench."):
            continue
        other = name.split(".")[1]
        if other in {me, "__version__"}:
            continue
        assert LAYER[other] <= LAYER[me], f"{path.name}:{line}: {me} imports {other}, a higher layer"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    me = part(path)
    for name, line, deferred in imports(path):
        top = name.split(".")[0]
        where = f"{path.name}:{line}"
        if top in {"torch", "triton"}:
            assert me not in TORCH_FREE, f"{where}: {me} must not import {top}"
            private_kernel = me == "kernels" and path.stem.startswith("_") and path.stem != "__init__"
            assert deferred or private_kernel, f"{where}: import {top} inside the function that needs it"
        if top in {"pandas", "plotly", "numpy", "rich"}:
            assert deferred, f"{where}: import {top} inside the function that needs it"
        if name.startswith("flashbench.kernels"):
            assert me not in NO_KERNELS, f"{where}: {me} must not import kernels"


def test_implementations_do_not_import_each_other() -> None:
    stems = {p.stem for p in (PACKAGE / "kernels").glob("*.py") if not p.stem.startswith("_")}
    for stem in stems:
        for name, line, _ in imports(PACKAGE / "kernels" / f"{stem}.py"):
            assert name.removeprefix("flashbench.kernels.") not in stems, f"{stem}.py:{line}: imports {name}"
            assert not name.endswith("._reference"), f"{stem}.py:{line}: an implementation imports the oracle"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_PER_MODULE
    for function in functions(path):
        kernel, command = is_kernel(function), part(path) == "_cli"
        lines = (function.end_lineno or 0) - function.lineno + 1
        if command and function.name in {
            "run",
            "check",
            "io_model",
            "kv_cache",
            "profile",
            "compare",
            "decode",
            "tune",
            "ring",
        }:
            continue  # their options are their body
        assert lines <= (LINES_PER_KERNEL if kernel else LINES_PER_FUNCTION), (
            f"{function.name}: {lines} lines"
        )
        arguments = function.args.args + function.args.kwonlyargs
        # as wide as attention's options, or flash-attention's functions
        interface = function.name in {"flash_attention", "attention"} or function.name.startswith(
            "flash_attn_"
        )
        if not kernel and not command and not interface:
            assert len(arguments) <= PARAMETERS + 1, f"{function.name}: {len(arguments)} parameters"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["io-model", "--sram", "192KB"],
        ["run", "--help"],
        ["list", "devices"],
        ["verify", "--help"],
        ["list", "presets"],
        ["kv-cache", "--model", "llama-3-70b", "--gpu", "h100-sxm"],
        ["io-model", "--world-size", "4", "--gpu", "h100-sxm"],
        ["ring", "--dry-run", "--gpu", "h100-sxm"],
    ],
    ids=" ".join,
)
def test_torch_stays_out(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['flashbench', *{arguments!r}]\n"
        "from flashbench.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'triton', 'pandas', 'plotly', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_importing_creates_no_cuda_context() -> None:
    code = "import flashbench, flashbench.cli, torch; assert not torch.cuda.is_initialized()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_only_console_and_commands_print() -> None:
    for path in FILES:
        if part(path) in {"console", "cli", "_cli"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                raise AssertionError(f"{path.name}:{node.lineno}: print() outside console and cli")


def test_committed_results_stay_small() -> None:
    total = sum(p.stat().st_size for p in (ROOT / "reports").rglob("*") if p.is_file())
    assert total < 25_000_000, f"reports/ holds {total} bytes; 25 MB in all is the limit"
