"""What is counted in machine code: on lines that NVIDIA's tools wrote, and against what ptxas says itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashbench._profilers import sass

SNIPPETS = {
    # of the forward kernel, bf16, head dim 128
    "sm_80": (
        """
        /*01c0*/                   MUFU.RCP R0, R0 ;
        /*0d40*/              @!P1 LDG.E.128 R8, [R2.64] ;
        /*1490*/                   STS.128 [R0], R8 ;
        /*1530*/              @!PT LDS RZ, [RZ] ;
        /*1560*/                   LDGSTS.E.BYPASS.128 [R0+0x8000], [R2.64], P5 ;
        /*15b0*/                   LDGDEPBAR ;
        /*1670*/              @!P1 BRA `(.L_x_0) ;
        /*1e80*/                   DEPBAR.LE SB0, 0x1 ;
        /*1e90*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*1f40*/                   LDSM.16.M88.4 R112, [R3+0x8000] ;
        /*2100*/                   HMMA.16816.F32.BF16 R108, R140, R112, RZ ;
        /*31d0*/                   MUFU.EX2 R83, R109 ;
        /*3220*/                   MUFU.EX2 R82, R82 ;
        /*5c30*/               @P1 STG.E [R72.64], R81 ;
""",
        {"mma": 1, "cp_async": 1, "ldg": 1, "stg": 1, "sts": 1, "ldsm": 1, "ex2": 2, "other_mufu": 1,
         "barrier": 1},
        13,
    ),
    # of the forward and the K/V gradient kernel
    "sm_90": (
        """
        /*0be0*/              @!P2 LDG.E.128 R28, desc[UR16][R14.64] ;
        /*1400*/                   LDGSTS.E.BYPASS.128 [R55], desc[UR16][R52.64], P0 ;
        /*16c0*/                   STL.64 [R1+0x8], R176 ;
        /*17a0*/                   STL [R1+0x10], R178 ;
        /*28d0*/                   WARPGROUP.ARRIVE ;
        /*29c0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*4380*/                   LDL.LU.64 R208, [R1+0x8] ;
        /*5290*/                   HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR12].tnspB, R88 ;
        /*6900*/                   LDSM.16.M88.4 R28, [R18+UR5] ;
""",
        {"wgmma": 2, "cp_async": 1, "ldg": 1, "ldsm": 1, "spill_store": 2, "spill_load": 1},
        9,
    ),
    # of the forward kernel
    "sm_100": (
        """
        /*00a0*/                   NOP ;
        /*0120*/                   UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR8 ;
        /*01e0*/                   ATOMS.OR RZ, [UR6+0x14], R2 ;
        /*0350*/                   LDS R73, [UR7] ;
        /*1a30*/                   STTM.x64 tmem[UR35], RZ ;
        /*1b50*/                   @UP0 SYNCS.EXCH.64 URZ, [UR7+0x18400], UR4 ;
        /*1e20*/                UTCHMMA gdesc[UR4], gdesc[UR12], tmem[UR10], tmem[UR28], idesc[UR29], !UPT ;
        /*1f90*/                   UTCBAR [UR32], URZ ;
""",
        {"tcgen05": 1, "shared_atomic": 1, "lds": 1, "sttm": 1, "mbarrier": 1},
        7,
    ),
    # of a kernel of bulk copies and atomics
    "tma": (
        """
        /*00a0*/               @P0 ELECT P1, URZ, PT ;
        /*00c0*/                   UTMALDG.2D [UR4], [UR10] ;
        /*0150*/                   UBLKCP.S.G [UR4], [UR6], UR12 ;
        /*0200*/                   UTMASTG.2D [UR4], [UR10] ;
        /*0220*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR8][R2.64], R11 ;
        /*0240*/               @P0 ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR8][R4.64], RZ ;
        /*02a0*/                   BRA `(.L_x_2);
        /*02b0*/                   NOP;
""",
        {"tma": 3, "atomic": 2},
        7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SNIPPETS)
def test_every_instruction_counts_once_under_its_class(name: str) -> None:
    text, expected, instructions = SNIPPETS[name]
    code = sass.count(text)
    assert {what: number for what, number in code.counts.items() if number} == expected
    assert code.counts.keys() == sass.CLASSES.keys()
    assert code.instructions == instructions
    assert code.code_bytes == 16 * len(text.strip().splitlines())


def test_spilled_bytes_are_those_of_the_instructions_widths() -> None:
    code = sass.count(SNIPPETS["sm_90"][0])
    assert (code.spill_stored_bytes, code.spill_loaded_bytes, code.spills) == (8 + 4, 8, 3)


def test_no_opcode_belongs_to_two_classes() -> None:
    opcodes = [opcode for names in sass.CLASSES.values() for opcode in names]
    assert len(opcodes) == len(set(opcodes))


@pytest.mark.parametrize("text", ["", "forward:\n.text.forward:\n", "/*0000*/ nothing"])
def test_text_without_instructions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no instruction"):
        sass.count(text)


USAGE = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function forward:
  REG:255 STACK:24 SHARED:1536 LOCAL:0 CONSTANT[0]:656 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_reserved_shared_memory_is_not_the_kernels() -> None:
    assert sass.usage(USAGE, "") == sass.Usage(255, 24, 1536)
    assert sass.usage(USAGE, "\t.type\t.nv.reservedSmem.offset0,@object") == sass.Usage(255, 24, 512)
    none = re.sub(r"SHARED:\d+", "SHARED:0", USAGE)
    assert sass.usage(none, "\t.type\t.nv.reservedSmem.offset0,@object").static_shared_bytes == 0
    with pytest.raises(ValueError, match="no registers"):
        sass.usage("Fatbin elf code", "")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_counts_agree_with_what_ptxas_says(arch: str, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton").knobs.nvidia
    ptxas = knobs.ptxas_blackwell if arch == "sm_100a" else knobs.ptxas
    (tmp_path / "spills.ptx").write_text(spilling(arch))
    made = run(ptxas.path, "-v", f"-arch={arch}", "spills.ptx", "-o", "spills.cubin", at=tmp_path)
    text = run(knobs.nvdisasm.path, "-c", "spills.cubin", at=tmp_path)
    code = sass.count(text)
    usage = sass.usage(run(knobs.cuobjdump.path, "-res-usage", "spills.cubin", at=tmp_path), text)
    said = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", made)
    assert said is not None, made
    assert (usage.stack_bytes, code.spill_stored_bytes, code.spill_loaded_bytes) == tuple(
        map(int, said.groups())
    )
    assert code.spill_stored_bytes > 0
    assert f"Used {usage.registers} registers" in made
    assert usage.static_shared_bytes == 512
    assert "512 bytes smem" in made
    assert code.counts["stg"] == VALUES
    assert code.counts["ex2"] == VALUES


VALUES = 64


def spilling(arch: str) -> str:
    """A kernel that holds more values than it may have registers, in PTX."""
    each = range(VALUES)
    return "\n".join([
        ".version 8.6", f".target {arch}", ".address_size 64",
        ".visible .entry spills(.param .u64 p) .maxntid 128 .maxnreg 32 {",
        ".shared .align 16 .b8 s[512];",
        f".reg .b64 %p; .reg .f32 %f<{VALUES}>; .reg .f32 %g<{VALUES}>; .reg .f32 %s;",
        "ld.param.u64 %p, [p]; ld.volatile.shared.f32 %s, [s];",
        *(f"ld.volatile.global.f32 %f{i}, [%p+{4 * i}];" for i in each),
        "bar.sync 0;",
        *(f"add.f32 %g{i}, %f{i}, %s; ex2.approx.ftz.f32 %g{i}, %g{i};"
          f" st.volatile.global.f32 [%p+{4 * i}], %g{i};" for i in each),
        *(f"add.f32 %s, %s, %f{i};" for i in each), "st.shared.f32 [s], %s;", "ret; }",
    ])  # fmt: skip


def run(*command: str, at: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=at)
    return done.stdout + done.stderr
