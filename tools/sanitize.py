"""Every bundled kernel under compute-sanitizer's four tools, on this machine's GPU.

python tools/sanitize.py --out reports/<card>/check/sanitizer
python tools/sanitize.py --out … --tools memcheck --groups flash-v3,fp8 --jobs 4
python tools/sanitize.py --out … --program /opt/newer/compute-sanitizer

What runs is in sanitizer_cases.py. A group of cases is a process, and so many run side by side; kernels are
compiled before, in parallel. torch's caching allocator is off, so that an access beside a tensor is one
beside an allocation. Each tool must also find the broken kernel of sanitizer_controls.py.

Writes sanitizer.jsonl (the machine and what speaks against a clean log, then a row per process: cases,
kernels, what was found) and sanitizer.log (what the tools said). Findings in kernels of others, torch's, are
counted apart; API calls that return an error are left out. Exits 0 where nothing was found in a bundled
kernel, every process did all that it should and left well, and every tool found its broken kernel; 1 else.
Where a tool also reports a small kernel that is right by construction (sanitizer_right.py), what it reports
of the same pattern is put aside, and the log says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import sanitizer_cases as cases  # noqa: E402

PROGRAM = "compute-sanitizer"
"""Of the CUDA toolkit, on PATH."""
TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")
"""The slowest first."""
OPTIONS = ("--target-processes", "application-only", "--show-backtrace", "no", "--print-limit", "5000",
           "--report-api-errors", "no")  # fmt: skip
OF_TOOL: dict[str, tuple[str, ...]] = {"memcheck": ("--padding", "256"), "racecheck": (), "initcheck": (),
                                       "synccheck": ()}  # fmt: skip
"""padding: a stretch beside each allocation that belongs to nobody."""
CONTROL = "control"
KEPT_LINES = 400
"""Of what a process said, half from its begin and half from its end."""
RAN = "ran"
UNWRITTEN = ("said", "mine")
"""Of a row, not in sanitizer.jsonl."""
DIED = "process didn't terminate successfully"
"""What the tools say of a process that a signal ended; their own exit code may be 0 then."""
AT = re.compile(r"\bat (\S.*?)(?:\(.*\))?\+0x[0-9a-f]+")
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (.*)")
NOTHING = ("ERROR 0 errors", "RACECHECK 0 hazards displayed (0 errors, 0 warnings)")
"""Summaries of a tool that found nothing."""
NO_FINDING = re.compile(r"COMPUTE-SANITIZER|\w+ SUMMARY|Program hit|This tool|Target application|$")


@dataclass(frozen=True)
class How:
    """The program, how many processes side by side, the seconds that each may take."""

    program: str
    jobs: int
    limit_s: float


@dataclass(frozen=True)
class Finding:
    """What a tool reported once, its lines. kernels: those that it names."""

    lines: tuple[str, ...]
    kernels: tuple[str, ...]


def findings(said: str) -> list[Finding]:
    """What a tool's output reports; a report is a line at the margin and those indented below it."""
    blocks: list[list[str]] = []
    for line in said.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if text.startswith("  ") and blocks:
            blocks[-1].append(text.strip())
        elif not NO_FINDING.match(text.strip()):
            blocks.append([text.strip()])
        else:
            blocks.append([])
    return [Finding(tuple(block), _kernels(block)) for block in blocks if block]


def _kernels(block: Iterable[str]) -> tuple[str, ...]:
    found = [name for line in block for name in AT.findall(line)]
    return tuple(dict.fromkeys(found))


def judged(said: str, ours: Iterable[str]) -> dict[str, Any]:
    """Of a tool's output: what it found in our kernels, in others', and its own last words."""
    known, found = set(ours), findings(said)
    mine = [one for one in found if not one.kernels or known & set(one.kernels)]
    last = [" ".join(match) for match in SUMMARY.findall(said)]
    return {
        "errors": len(mine),
        "named": sum(bool(known & set(one.kernels)) for one in mine),
        "errors_of_others": len(found) - len(mine),
        "mine": mine,
        "found": [f"{one.lines[0]} [{', '.join(one.kernels)}]" for one in mine if one.kernels][:20],
        "nameless": [" | ".join(one.lines) for one in mine if not one.kernels][:20],
        "summary": last[-1] if last else None,
    }


def run_group(group: str) -> NoReturn:
    """In a process of its own: the cases of the group, one after the other.

    The process ends where it stands, its device idle and all of it said: torch's own threads do not always
    outlive the interpreter's end in peace under a tool.
    """
    code, held = 0, []
    try:
        if group.startswith(CONTROL):
            held.append(_control(group.partition(":")[2]))
        elif group.startswith("right "):
            import sanitizer_right

            sanitizer_right.RIGHT[group].run()
            _done(group)
        else:
            _cases(group)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _cases(group: str) -> None:
    import torch

    for case in cases.CASES:
        if case.group == group:
            case.run("cuda")
            torch.cuda.synchronize()
            _done(case.name)


def _control(tool: str) -> object:
    """Run the tool's broken kernel; its tensors, whose memory a broken device cannot free."""
    import sanitizer_controls
    import torch

    kept = sanitizer_controls.run(tool)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("it broke the device:", str(error).partition("\n")[0], flush=True)
    _done(CONTROL)
    return kept


def _done(name: str) -> None:
    """In one piece, as the tool writes to the same place."""
    sys.stdout.write(f"done {name}\n")
    sys.stdout.flush()


def one_process(tool: str | None, group: str, how: How) -> dict[str, Any]:
    """The row of a group under a tool, or of None under none; ``said`` is all that was written."""
    name = f"{CONTROL}:{tool}" if group == CONTROL else group
    command = [sys.executable, __file__, "--run", name]
    if tool is not None:
        command = [how.program, "--tool", tool, *OPTIONS, *OF_TOOL[tool], *command]
    began = time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True, errors="replace",
    ) as child:  # fmt: skip
        try:
            said, killed = child.communicate(timeout=how.limit_s)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            said, killed = child.communicate()[0], True
    wanted = [one.name for one in cases.CASES if one.group == group] or [group]
    lines = set(said.splitlines())
    done = [one for one in wanted if f"done {one}" in lines]
    status = RAN
    if killed:
        status = f"killed after {how.limit_s:.0f} s"
    elif child.returncode or DIED in said or len(done) < len(wanted):
        status = f"died or left early, code {child.returncode}, {len(done)} of {len(wanted)} done"
    row = {"tool": tool, "group": group, "status": status, "wall_s": round(time.monotonic() - began, 1)}
    return row | {"cases": done, "not_run": [one for one in wanted if one not in done], "said": said}


def warm(groups: Sequence[str], how: How) -> list[dict[str, Any]]:
    """Compile what the cases need, then run each group without a tool."""
    from flashbench import environment
    from flashbench.kernels import _compile

    target = environment.target("cuda:0")
    _compile.precompile(cases.cells(groups), target)
    with ThreadPoolExecutor(how.jobs) as pool:
        return list(pool.map(lambda group: one_process(None, group, how), groups))


def sanitized(tools: Sequence[str], groups: Sequence[str], how: How) -> list[dict[str, Any]]:
    """The rows of every tool and group, so many processes side by side."""
    import sanitizer_controls
    import sanitizer_right

    kernels = {
        group: sorted({name for one in cases.CASES if one.group == group for name in cases.launched(one)})
        for group in groups
    }
    ours = {name.partition(".")[2] for names in kernels.values() for name in names}

    def row(pair: tuple[str, str]) -> dict[str, Any]:
        tool, group = pair
        found = one_process(tool, group, how)
        if group not in kernels:
            right = sanitizer_right.RIGHT.get(group)
            own = right.kernel if right else sanitizer_controls.OF[tool].fn.__name__
            found |= {"kernels": [own], **judged(found["said"], [own])}
        else:
            found |= {"kernels": kernels[group], **judged(found["said"], ours)}
        told = f"{found['errors']} errors, {found['errors_of_others']} of others, {found['wall_s']} s"
        print(f"{tool} {group}: {found['status']}, {told}", flush=True)
        return found

    pairs = [(tool, group) for tool in tools for group in (CONTROL, *groups)]
    pairs += [(one.tool, group) for group, one in sanitizer_right.RIGHT.items() if one.tool in tools]
    with ThreadPoolExecutor(how.jobs) as pool:
        return list(pool.map(row, pairs))


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What speaks against a clean log, a line each."""
    found = []
    for row in rows:
        what = f"{row['tool']} {row['group']}"
        if row["status"] != RAN:
            found.append(f"{what}: {row['status']}")
        if row["group"] == CONTROL:
            if not row["named"]:
                found.append(f"{what}: the broken kernel was not found")
            continue
        if row["errors"] and not row.get("right"):
            found.append(f"{what}: {row['errors']} errors")
        elif not row["mine"] and not row["errors_of_others"] and row["summary"] not in NOTHING:
            found.append(f"{what}: no report was read, but its last words are {row['summary']!r}")
    return found


def machine(program: str) -> dict[str, Any]:
    """Where it ran, and with what."""
    from flashbench import environment

    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    about = environment.collect(environment.target("cuda:0"))
    said = [line for line in version.splitlines() if "ersion" in line]
    return {"type": "sanitizer", "schema": 1, "sanitizer": said[-1].strip() if said else None,
            "kernels": sorted(cases.entries()), "environment": about}  # fmt: skip


def write(out: Path, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """sanitizer.jsonl and sanitizer.log."""
    out.mkdir(parents=True, exist_ok=True)
    kept = [head, *({key: value for key, value in row.items() if key not in UNWRITTEN} for row in rows)]
    (out / "sanitizer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
    parts = [f"# {PROGRAM} {head['sanitizer']}", *(f"# wrong: {one}" for one in head["wrong"]),
             *(f"# put aside: {one}" for one in head["aside"]), ""]  # fmt: skip
    for row in rows:
        lines = row["said"].splitlines()
        if len(lines) > KEPT_LINES:
            half = KEPT_LINES // 2
            lines = [*lines[:half], f"… {len(lines) - KEPT_LINES} lines more", *lines[-half:]]
        parts += [f"# {row['tool']} {row['group']}: {row['status']}", *lines, ""]
    (out / "sanitizer.log").write_text("\n".join(parts), "utf-8")


def chosen(option: str, given: str, known: Sequence[str]) -> list[str]:
    """The names that an option lists."""
    names = given.split(",")
    for name in names:
        if name not in known:
            refuse(f"{option} {name!r}: not one of {', '.join(known)}")
    return names


def refuse(why: str) -> NoReturn:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    every = tuple(dict.fromkeys(one.group for one in cases.CASES))
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--program", default=PROGRAM, help="another compute-sanitizer than that on PATH")
    arguments.add_argument("--tools", default=",".join(TOOLS))
    arguments.add_argument("--groups", default=",".join(every))
    arguments.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    arguments.add_argument("--limit", type=float, default=110.0, help="seconds of one process")
    arguments.add_argument("--run", help="a group, in this process")
    given = arguments.parse_args()
    if given.run:
        run_group(given.run)
    if given.out is None:
        refuse("--out FOLDER is needed")
    program = shutil.which(given.program)
    if program is None:
        refuse(f"--program {given.program!r}: no program that may be run, on PATH or as a file")
    tools, groups = chosen("--tools", given.tools, TOOLS), chosen("--groups", given.groups, every)
    how, began = How(program, given.jobs, given.limit), time.monotonic()
    plain = warm(groups, how)
    broken = [f"without a tool {row['group']}: {row['status']}" for row in plain if row["status"] != RAN]
    print(f"compiled and run once in {time.monotonic() - began:.0f} s", *broken, sep="\n", flush=True)
    for row in plain:
        if row["status"] != RAN:
            print(row["said"][-1500:], flush=True)
    rows = sanitized(tools, groups, how)
    import sanitizer_right

    aside = sanitizer_right.put_aside(rows)
    broken += wrong(rows)
    write(given.out, {**machine(program), "wrong": broken, "aside": aside}, rows)
    print(*broken, *(f"put aside: {one}" for one in aside), sep="\n")
    print(f"{len(rows)} processes in {time.monotonic() - began:.0f} s")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
