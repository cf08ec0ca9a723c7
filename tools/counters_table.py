"""How near the model is to what cards counted, from the results under reports/*/counters.

python tools/counters_table.py            print the tables
python tools/counters_table.py --write    put them into docs/counters.md
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import marked  # noqa: E402

from flashbench import compared, devices, kernels, runfile  # noqa: E402
from flashbench.compared import Level  # noqa: E402
from flashbench.devices import Device  # noqa: E402
from flashbench.kernels import Target, _compile  # noqa: E402
from flashbench.record import Record  # noqa: E402

FOLDER = ROOT / "reports" / "h100-sxm" / "counters"
PAGE = ROOT / "docs" / "counters.md"
BEGIN, END = "<!-- counters: tools/counters_table.py --write -->", "<!-- end of counters -->"
DEVICE = devices.find("h100-sxm")
"""The card of nearly all counts."""


class Found(NamedTuple):
    """One level of one cell, of the call as a whole or of one kernel."""

    record: Record
    level: Level


def files() -> list[Path]:
    """Every file of counts, of any card."""
    return sorted((ROOT / "reports").glob("*/counters/*/results.jsonl"))


@cache
def records() -> tuple[Record, ...]:
    """Every counted cell once, by key: of one that was counted more than once, the latest run's."""
    runs = [runfile.load(path) for path in files()]
    latest = {
        record.cell.key: record
        for run in sorted(runs, key=lambda run: str(run.header["created_at"]))
        for record in run.records
        if "total" in record.counters
    }
    return tuple(sorted(latest.values(), key=_order))


def card(record: Record) -> Device:
    """The card that counted."""
    found = devices.match(str(record.environment["device_name"]))
    assert found is not None
    return found


def _place(device: Device) -> Target:
    """The same card as a place to run: what would be launched there today."""
    return Target(
        device="cuda", capability=device.capability, smem_per_block_bytes=device.smem_per_block_bytes,
        l2_bytes=device.l2_bytes, num_sms=device.num_sms,
    )  # fmt: skip


def _order(record: Record) -> tuple[object, ...]:
    p = record.cell.problem
    return record.cell.implementation, p.head_dim, p.causal, p.seqlen_k, record.cell.pass_ != "fwd"


FORM = "fwd_cut"
"""The field that names the form of a forward of flash-v3. Rows from before it was recorded lack it."""
LATER = re.compile(r"\.(max3|e\d+|p\d+|guard\d+)\b")
"""What came to the kernels with that field or after it: a row without the field was counted without these."""
TOLD = "_block_q", "_block_k", "_num_warps", "_num_stages", "_q_stages", FORM
"""How the names of fields end that say how a kernel is cut."""


def cut(implementation: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which kernels ran, and of these all that a row says of their tiles, splits, warps, buffers and form."""
    told = {name: value for name, value in config.items() if name.endswith(TOLD)}
    return {"kernels": str(config.get("kernels", implementation)).partition(":")[0], **told}


def today(record: Record) -> Mapping[str, Any]:
    """The configuration with which a bundled implementation runs a counted cell on such a card today."""
    cell = record.cell
    return kernels.get(cell.implementation).on_card(cell.problem, cell.pass_, _place(card(record)))


def bundled() -> list[Record]:
    """Counted cells of kernels of this package."""
    return [record for record in records() if record.cell.implementation in _compile.BUNDLED]


Sides = tuple[dict[str, Any], dict[str, Any]]
"""What differs, as it was counted and as it runs today."""


def differing(implementation: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Sides:
    """What differs between two configurations; None of a field that a side lacks."""
    sides = cut(implementation, then), cut(implementation, now)
    fields = [field for field in {**sides[0], **sides[1]} if sides[0].get(field) != sides[1].get(field)]
    return {field: sides[0].get(field) for field in fields}, {field: sides[1].get(field) for field in fields}


@cache
def recut() -> dict[str, Sides]:
    """Cells whose row is known or not known to be cut as today: key → what differs, then and now."""
    found = {}
    for record in bundled():
        then, now = differing(record.cell.implementation, record.config, today(record))
        if then:
            found[record.cell.key] = then, now
    return found


def untold(sides: Sides) -> bool:
    """Whether a row may have been counted as its cell runs today: all that it says is as today, but it names
    no form, and that of today has nothing that came later.
    """
    return sides[0] == {FORM: None} and not LATER.search(sides[1][FORM])


def recuts() -> list[str]:
    """How many cells are cut as today in all that their rows say, and a row per cell that is not."""
    found, every = recut(), len(bundled())
    apart = {key: sides for key, sides in found.items() if not untold(sides)}
    said = f"{len(apart)} of {every} cells of bundled kernels; {every - len(found)} are as today in all that"
    lines = [f"{said} their rows record.", "", "| cell | counted with | runs today with |", "|---|---|---|"]
    for key, sides in apart.items():
        then, now = (", ".join(_field(name, one[name]) for name in _shown(sides)) for one in sides)
        lines.append(f"| {key} | {then} | {now} |")
    return lines if apart else lines[:1]


def _shown(sides: Sides) -> list[str]:
    """The fields to show: of a form that both sides name its name alone, which tells the forward's others."""
    named = all(side.get(FORM) for side in sides)
    return [name for name in sides[0] if name == FORM or not (named and name.startswith("fwd_"))]


def _field(name: str, value: object) -> str:
    return f"{name} {'not recorded' if value is None else value}"


def unnamed() -> list[str]:
    """A row per cell of which cannot be told whether it was counted with another form."""
    found = {key: sides for key, sides in recut().items() if untold(sides)}
    lines = ["| cell | runs today with |", "|---|---|"]
    lines += [f"| {key} | {_field(FORM, now[FORM])} |" for key, (_, now) in found.items()]
    return lines if found else ["None."]


def _model(record: Record) -> str | None:
    """The model, as it is today, of the kernels that ran: those that flash chose, or the cell's own."""
    ran = str(record.config.get("kernels", "")).partition(":")[0]
    return kernels.get(ran or record.cell.implementation).io_model


@cache
def load() -> tuple[Found, ...]:
    """Every level of every counted cell."""
    found: list[Found] = []
    for record in records():
        levels = compared.compare(record.cell, record.counters, _model(record), record.config, card(record))
        found += [Found(record, level) for level in levels]
    return tuple(found)


def table(found: Sequence[Found]) -> list[str]:
    """A row per implementation, pass and level: counted over predicted, and cells in the band."""
    groups: dict[tuple[str, str, str], list[Level]] = {}
    for row in found:
        if not row.level.kernel and row.level.value is not None:
            key = (row.record.cell.implementation, row.record.cell.pass_, row.level.level)
            groups.setdefault(key, []).append(row.level)
    lines = [
        "| implementation | pass | level | cells | counted/predicted: least | median | most | in the band |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, pass_, level), rows in sorted(groups.items()):
        ratios = sorted(row.ratio for row in rows if row.ratio is not None)
        inside = sum(row.within is True for row in rows)
        if ratios:
            least, middle, most = ratios[0], statistics.median(ratios), ratios[-1]
            lines.append(
                f"| {name} | {pass_} | {level} | {len(rows)} | {least:.3f} | {middle:.3f} | {most:.3f} |"
                f" {inside}/{len(rows)} |"
            )
    return lines


def kernel(row: Found) -> str:
    """The name of a kernel in its model; empty of a call that is one kernel."""
    return row.level.kernel.partition(":")[0]


def requested(found: Sequence[Found]) -> list[Found]:
    """L2 reads of bundled kernels, kernel by kernel; of a call that is one kernel, the call."""
    reads = [
        row
        for row in found
        if row.level.level == "L2 read" and row.level.value
        if row.record.cell.implementation in _compile.BUNDLED
    ]
    parted = {row.record.cell.key for row in reads if row.level.kernel}
    return [row for row in reads if row.level.kernel or row.record.cell.key not in parted]


def spared(row: Found) -> float:
    """Of what a kernel asks for, the share that the L1 may answer at most."""
    assert row.level.value is not None
    assert row.level.low is not None
    return 1 - row.level.low / row.level.value


def by_kernel(found: Sequence[Found]) -> list[str]:
    """A row per bundled kernel: L2 reads counted over predicted, and how much the L1 may answer at most."""
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for row in requested(found):
        cell = row.record.cell
        groups.setdefault((cell.implementation, cell.pass_, kernel(row)), []).append(row)
    lines = [
        "| implementation | pass | kernel | launches | counted/predicted: least | median | most |"
        " of it the L1 may answer | within 1 %, that apart |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, pass_, one), rows in sorted(groups.items()):
        ratios = sorted(row.level.ratio for row in rows if row.level.ratio is not None)
        least, middle, most = ratios[0], statistics.median(ratios), ratios[-1]
        share = max(spared(row) for row in rows)
        held = sum(close(row) for row in rows)
        lines.append(
            f"| {name} | {pass_} | {one or 'the only one'} | {len(rows)} | {least:.4f} | {middle:.4f} |"
            f" {most:.4f} | {f'{share:.1%}' if share else '-'} | {held}/{len(rows)} |"
        )
    return lines


def close(row: Found) -> bool:
    """Whether a kernel's L2 reads are the model's to 1 %, but for what the L1 may answer."""
    assert row.level.ratio is not None
    return 0.99 - spared(row) <= row.level.ratio <= 1.01


class Op(NamedTuple):
    """DRAM bytes of one op of naive: reads, writes or both."""

    name: str
    counted: int
    value: int

    @property
    def ratio(self) -> float:
        """Counted over predicted."""
        return self.counted / self.value

    @property
    def missing(self) -> float:
        """What was counted less than predicted, as a share of the L2."""
        return (self.value - self.counted) / DEVICE.l2_bytes


def moved(found: Sequence[Found]) -> dict[str, list[Op]]:
    """naive op by op, all cells, by what is compared: reads, reads and writes, writes; least ratio first."""
    levels: dict[str, dict[str, Level]] = {}
    for row in found:
        op = row.level.kernel.rpartition(": ")[0]
        if row.record.cell.implementation == "naive" and op:
            levels.setdefault(f"{op} of {row.record.cell.key}", {})[row.level.level] = row.level
    ops: dict[str, list[Op]] = {}
    for name, found_levels in levels.items():
        both = found_levels["DRAM read"], found_levels["DRAM write"]
        for what, some in (("reads", both[:1]), ("reads and writes", both), ("writes", both[1:])):
            sums = (sum(getattr(one, side) for one in some) for side in ("counted", "value"))
            ops.setdefault(what, []).append(Op(name, *sums))
    return {what: sorted(rows, key=lambda op: op.ratio) for what, rows in ops.items()}


def compared_ops(found: Sequence[Found]) -> list[str]:
    """What of naive's ops is within 2 %, and what is not."""
    lines = [
        "| DRAM bytes of an op | ops | counted/predicted: least | most | within 2 % | missing, of L2 |",
        "|---|---|---|---|---|---|",
    ]
    for what, ops in moved(found).items():
        within = sum(abs(op.ratio - 1) <= 0.02 for op in ops)
        least, most = (f"{op.ratio:.3f} ({op.name})" for op in (ops[0], ops[-1]))
        missing = max(op.missing for op in ops)
        lines.append(f"| {what} | {len(ops)} | {least} | {most} | {within}/{len(ops)} | {missing:.1%} |")
    return lines


def operations(found: Sequence[Found]) -> list[str]:
    """naive op by op at N = 4096: DRAM bytes counted over predicted."""
    lines = ["| cell | op | read, counted/predicted | written, counted/predicted |", "|---|---|---|---|"]
    rows: dict[tuple[str, str], dict[str, float | None]] = {}
    for row in found:
        cell = row.record.cell
        if cell.implementation == "naive" and cell.problem.seqlen_q == 4096 and row.level.kernel:
            op = row.level.kernel.rpartition(": ")[0] or row.level.kernel[:40]
            rows.setdefault((cell.key, op), {})[row.level.level] = row.level.ratio
    for (key, op), ratios in rows.items():
        shown = [f"{r:.3f}" if (r := ratios.get(f"DRAM {kind}")) else "-" for kind in ("read", "write")]
        lines.append(f"| {key} | {op} | {shown[0]} | {shown[1]} |")
    return lines


def plain(record: Record) -> bool:
    """Whether a cell is one of the sweep's: bf16, 16k tokens or one batch, 2048 wide, no option."""
    p = record.cell.problem
    sized = p.batch * p.seqlen_q == max(p.seqlen_q, 16384) and p.num_heads * p.head_dim == 2048
    return p.dtype == "bf16" and p.seqlen_q == p.seqlen_k and sized and not p.features


def others(found: Sequence[Found]) -> list[str]:
    """Cells that are not the sweep's, one by one: counted over predicted."""
    names = ("L2 read", "L2 write", "DRAM read", "DRAM write")
    lines = [f"| cell | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    rows: dict[str, dict[str, str]] = {}
    for row in found:
        if row.level.kernel or plain(row.record) or row.level.ratio is None:
            continue
        shown = f"{row.level.ratio:.3f}"
        rows.setdefault(row.record.cell.key, {})[row.level.level] = (
            shown if row.level.within else f"**{shown}**"
        )
    return lines + [
        f"| {key} | {' | '.join(levels.get(name, '-') for name in names)} |" for key, levels in rows.items()
    ]


def lengths(found: Sequence[Found], level: str) -> list[str]:
    """The fused implementations' sweep cell by cell: GB counted / predicted, in bold outside the band."""
    seqlens = [1024 * 2**step for step in range(7)]
    heads = "".join(f" {n // 1024}k |" for n in seqlens)
    lines = [f"| implementation | pass | d | mask |{heads}", "|---" * (4 + len(seqlens)) + "|"]
    rows: dict[tuple[str, str, int, bool], dict[int, str]] = {}
    for row in found:
        cell = row.record.cell
        p = cell.problem
        if row.level.kernel or row.level.level != level or cell.implementation == "naive":
            continue
        if not plain(row.record):
            continue
        assert row.level.counted is not None
        assert row.level.value is not None
        shown = f"{row.level.counted / 1e9:.3g} / {row.level.value / 1e9:.3g}"
        key = (cell.implementation, cell.pass_, p.head_dim, p.causal)
        rows.setdefault(key, {})[p.seqlen_q] = shown if row.level.within else f"**{shown}**"
    for (name, pass_, dim, causal), cells in rows.items():
        numbers = " | ".join(cells.get(n, "-") for n in seqlens)
        lines.append(f"| {name} | {pass_} | {dim} | {'causal' if causal else 'none'} | {numbers} |")
    return lines


def elsewhere() -> list[str]:
    """Cells of the tables that another card than ``DEVICE`` counted."""
    found = [record for record in records() if card(record) != DEVICE]
    return ["| cell | card |", "|---|---|", *(f"| {one.cell.key} | {card(one).name} |" for one in found)]


def page() -> str:
    """All tables, as they stand in the docs."""
    found = load()
    parts = {
        "**DRAM reads, GB counted / predicted** (bold: outside the band)": lengths(found, "DRAM read"),
        "**DRAM writes, GB counted / predicted**": lengths(found, "DRAM write"),
        "**Options, decode, fp8 and other shapes, counted over predicted** (bold: outside the band)": others(
            found
        ),
        "**Requested bytes of the bundled kernels, kernel by kernel**": by_kernel(found),
        "**`naive`, every op of every cell, counted over predicted**": compared_ops(found),
        "**`naive`, op by op at 4k**": operations(found),
        "**Counted on another card** than an H100 SXM, the latest count of the cell": elsewhere(),
        "**Counted with another cut** than runs the cell today": recuts(),
        f"**Not known**: as today in all that the row records, which was before `{FORM}` was": unnamed(),
    }
    lines = [line for title, rows in parts.items() for line in ("", title, "", *rows)]
    return "\n".join([BEGIN, "", *table(found), *lines, "", END])


if __name__ == "__main__":
    marked.main(__doc__, page, PAGE)
