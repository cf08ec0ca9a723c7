"""The sections of the report, in order. To add one: a row here, and the functions that it names.

A section is data (data.py, summary.py) → figure (figures.py, for plots) → page (page.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashbench.report import (
    across,
    blocks,
    cells,
    claimed,
    data,
    decoded,
    figures,
    glance,
    joined,
    numerics,
    onchip,
    page,
    roofline,
    summary,
    tabled,
    tensors,
    timelines,
    words,
)
from flashbench.report.data import Results
from flashbench.report.figures import Axis, Figure
from flashbench.report.tabled import Tabled

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section: what it shows, how, and what it says when there is nothing to show.

    data: Results to a frame; figure: that frame to a figure (None for text and tables);
    page: (section, frame) to the HTML of its body; tables: that frame to tables, which Markdown and a
    terminal show as well.
    """

    key: str
    title: str
    about: str
    data: Callable[[Results], DataFrame]
    page: Callable[[Section, DataFrame], str]
    empty: str
    figure: Callable[[DataFrame], Figure] | None = None
    tables: Callable[[DataFrame], Iterator[Tabled]] | None = None


SECTIONS = (
    Section(
        key="summary", title="At a glance", about="", data=summary.headline, page=glance.headline,
        empty="The results hold no cell.",
    ),
    Section(
        key="fastest", title="Who is fastest",
        about="Per selection, over the lengths at which at least two implementations were timed."
        " ± is half the interquartile range of both sides; a lead within it is level. Cells flagged suspect"
        " do not count.",
        data=summary.regimes, page=glance.regimes,
        empty="No length has two timed implementations to compare.",
    ),
    Section(
        key="latency", title="Latency",
        about="Median time of one call, both axes logarithmic. A ring marks a flagged cell; a mark below"
        " the plot stands for a cell without a time.",
        data=data.points("time_s"), page=page.plot,
        figure=figures.line_figure(Axis(title="time per call", tick=words.seconds_tick), words.time_note),
        empty="No cell was timed.",
    ),
    Section(
        key="throughput", title="Throughput",
        about="Nominal FLOPs of the visible pairs over the median time: one count for all implementations,"
        " so ratios here are ratios of time.",
        data=data.points("flops_per_s"), page=page.plot,
        figure=figures.line_figure(Axis(title="FLOP/s", kind="linear", rate=True), words.rate_note),
        empty="No cell was timed.",
    ),
    Section(
        key="speedup", title="Speed-up",
        about="The baseline's median time over each implementation's, for the same problem in the same run;"
        " choose the baseline at the top. Where it could not run there is nothing to divide.",
        data=data.speedup, page=page.plot, figure=figures.speedup_figure, empty="No cell was timed.",
    ),
    Section(
        key="memory", title="Memory, measured and predicted",
        about="Most allocated during the call minus what was allocated before it: outputs and scratch, not"
        " the inputs. Lines with markers are measured, dotted ones follow from the model; the dashed line"
        " across is all that the card has.",
        data=data.memory, page=page.plot, figure=figures.memory_figure,
        empty="Memory was not measured, and no implementation names a model.",
    ),
    Section(
        key="traffic", title="Bytes by algorithm",
        about="What each algorithm asks of the level behind on-chip memory, from closed forms; the dotted"
        " line reads every input and writes every output once. Caches serve part of it, so DRAM moves less.",
        data=data.traffic, page=page.plot, figure=figures.traffic_figure,
        empty="There is no problem to model.",
    ),
    Section(
        key="tensors", title="Bytes by tensor",
        about="What of them is of which tensor, at the longest length, in all kernels of the pass."
        " Choose other problems with 'flashbench io-model --html'.",
        data=tensors.data, page=tensors.page, empty="There is no problem without options to model.",
    ),
    Section(
        key="onchip", title="Bytes against on-chip memory",
        about="Requested bytes at the longest length with the tiles that M gives (flash-v1: block_k = M/4d,"
        " flash-v2: block_q = M/2d). Hollow: the tile does not fit. The line up is what the card's SM has.",
        data=onchip.by_memory, page=page.plot, figure=onchip.memory_figure,
        empty="There is no problem without options to model.",
    ),
    Section(
        key="block", title="Bytes against block size",
        about="Requested bytes at the longest length with square tiles of so many rows of Q and of K/V in"
        " every kernel.",
        data=onchip.by_block, page=page.plot, figure=onchip.block_figure,
        empty="There is no problem without options to model.",
    ),
    Section(
        key="roofline", title="Roofline",
        about="Achieved FLOP/s over FLOPs per byte, under what bandwidth and dense peak allow: solid by the"
        " data sheet, dashed as 'flashbench calibrate' measured this card. Choose at the top which bytes:"
        " each tensor once, DRAM (as counted, else by the model) or what kernels ask of the L2. An"
        " implementation whose bytes no model knows has no point there.",
        data=roofline.data, page=page.plot, figure=roofline.figure,
        empty="No timed cell ran on a device whose peak and bandwidth are known.",
    ),
    Section(
        key="l2", title="L2 reads, counted over modelled",
        about="What the hardware counted between L2 and the SMs over what the model says, to the byte. 1 is"
        " as modelled; below, the L1 answered; above, a kernel does something that its model does not know.",
        data=data.counted("l2_read_ratio"), page=page.plot,
        figure=figures.line_figure(Axis(title="counted / modelled", kind="linear"), words.counted_note),
        empty="No cell with an exact model was counted ('run --counters', 'profile --counters').",
    ),
    Section(
        key="dram", title="DRAM reads, counted over expected",
        about="Each kernel from a cold L2, as the profiler flushes it. The model's DRAM is an expectation"
        " within a band ('flashbench profile --counters' shows it); 1 is as expected.",
        data=data.counted("dram_read_ratio"), page=page.plot,
        figure=figures.line_figure(Axis(title="counted / expected", kind="linear"), words.counted_note),
        empty="No cell was counted ('run --counters', 'profile --counters') on a card that is known.",
    ),
    Section(
        key="joined", title="Model, trace and counters",
        about="Bytes of each cell: by its model, as Triton's interpreter traced its kernels (one K/V head of"
        " one batch for all), as the hardware counted them (L2 writes without spilled registers). Trace and"
        " model are exact; at DRAM the model is a band. A count outside its band is marked.",
        data=data.joined, page=joined.joined,
        empty="No cell was counted or traced ('run --counters --trace', 'profile --counters --trace').",
    ),
    Section(
        key="split", title="Backward over forward",
        about="Time of the backward over that of the forward of the same problem. The backward does 2.5 times"
        " the forward's nominal FLOPs where d = dv.",
        data=data.backward_ratio, page=page.plot,
        figure=figures.line_figure(Axis(title="backward / forward", kind="linear"), words.ratio_note),
        empty="No implementation was timed in both passes ('run --passes fwd,bwd').",
    ),
    Section(
        key="timeline", title="Kernels of a call",
        about="Each kernel's share of the kernels' time of one call, in the order of their start.",
        data=timelines.data, page=timelines.page, figure=timelines.figure,
        empty="No kernels were recorded ('profile --timeline --json > FILE', 'report --timeline FILE').",
    ),
    Section(
        key="energy", title="Energy",
        about="Joules of the whole board per nominal TFLOP, back to back.",
        data=data.points("j_per_tflop"), page=page.plot,
        figure=figures.line_figure(Axis(title="J per nominal TFLOP", kind="linear"), words.energy_note),
        empty="Energy was not measured ('run --energy').",
    ),
    Section(
        key="stability", title="Stability",
        about="Interquartile range of the samples over their median. A ring marks a flagged cell; hover for"
        " samples and flags.",
        data=data.points("spread"), page=page.plot,
        figure=figures.line_figure(Axis(title="spread", kind="linear", percent=True), words.spread_note),
        empty="No cell was timed.",
    ),
    Section(
        key="clocks", title="Clocks",
        about="Median SM clock over the rounds of samples, as the driver read it: a lower one stretches every"
        " time alike.",
        data=data.points("sm_clock_hz"), page=page.plot,
        figure=figures.line_figure(Axis(title="SM clock (GHz)", kind="linear", ghz=True), words.clock_note),
        empty="No clocks were read: by older versions, on a CPU, or without the driver's library.",
    ),
    Section(
        key="causal", title="Causal over full",
        about="Time with the causal mask over time without it. The mask hides half of the pairs, so a kernel"
        " that skips hidden tiles comes near 0.5; 1 means that nothing is skipped.",
        data=data.causal_ratio, page=page.plot,
        figure=figures.line_figure(Axis(title="causal time / full time", kind="linear"), words.ratio_note),
        empty="No implementation was timed both with and without the causal mask.",
    ),
    Section(
        key="numerics", title="Errors against fp64",
        about="Root mean square error of o against fp64 attention of the inputs before any dtype rounded"
        " them; beside it the largest error, and what rounding the inputs costs by itself.",
        data=numerics.data, page=tabled.page, tables=numerics.tables,
        empty="No errors were measured ('check --numerics --out').",
    ),
    Section(
        key="blocks", title="Whole layers",
        about="A stack of a model's layers with random weights: a forward and backward (train) or a forward"
        " (infer), no optimizer. MFU: matrix FLOPs, three forwards to a training step, over the dense peak."
        " The share of attention is its calls timed alone over the step.",
        data=blocks.data, page=tabled.page, tables=blocks.tables,
        empty="No layers were measured ('block --out').",
    ),
    Section(
        key="decode", title="Decoding",
        about="One layer's attention of a decode step over a cache, as a CUDA graph from a cold L2. Rates are"
        " of the bytes that no kernel can avoid (K, V, q, o, lse, block table, each once), beside what a copy"
        " reached in the same run; bound: those bytes at the data sheet's bandwidth. Splits: thread blocks"
        " that share a sequence's keys. Contiguous: the fastest cache in one piece for the same step.",
        data=decoded.data, page=tabled.page, tables=decoded.tables,
        empty="No decode step was measured ('decode --out').",
    ),
    Section(
        key="across", title="Across cards",
        about="One sequence on several cards, checked against fp64 before it was timed. Speed-up: over the"
        " same kernels on one card; efficiency: that over the number of cards. Overlap: of the shorter of"
        " compute and link, each timed alone, the share that costs no time. Bytes: what the rank that sends"
        " most sent, counted, beside the model's.",
        data=across.data, page=tabled.page, tables=across.tables,
        empty="Nothing was measured across cards ('ring --out').",
    ),
    Section(
        key="claims", title="The literature's claims",
        about="Claims of papers and documentation, each computed from these cells, or from a folder's"
        " ('--claims'); the papers' cards and lengths stand beside them. The spread is that of both sides."
        " Cells flagged launch-bound or suspect decide nothing on speed.",
        data=claimed.data, page=claimed.page,
        empty="No claim is about these cells ('report --claims DIR' holds all to the results below a folder,"
        " 'flashbench claims' names what measures each).",
    ),
    Section(
        key="untimed", title="What was not timed, and why", about="", data=data.untimed, page=page.untimed,
        empty="Every cell was timed.",
    ),
    Section(
        key="cells", title="All cells", about="Every row of the run. Click a heading to sort.",
        data=data.cells, page=cells.cells, empty="The results hold no cell.",
    ),
    Section(
        key="environment", title="Environment and command", about="", data=data.environment,
        page=page.environment, empty="The files carry no header.",
    ),
)  # fmt: skip
