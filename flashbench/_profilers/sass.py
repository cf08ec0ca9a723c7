"""What a compiled kernel consists of, counted in the text that NVIDIA's disassemblers write.

Counts are of instructions in the code, each once however often it runs: a loop body counts like a
prologue. Names of instructions: CUDA Binary Utilities, "Instruction Set Reference".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
"""Every instruction since Volta (CUDA Binary Utilities)."""

RESERVED_SHARED_BYTES = 1024
"""What the system keeps of the shared memory of every block, from compute capability 8.0 on."""

CLASSES: Mapping[str, frozenset[str]] = {
    name: frozenset(opcodes.split())
    for name, opcodes in {
        "wgmma": "HGMMA QGMMA IGMMA BGMMA",
        "mma": "HMMA QMMA IMMA BMMA DMMA OMMA",
        "tcgen05": "UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
        "tma": "UTMALDG UTMASTG UTMAREDG UTMAPF UBLKCP UBLKRED UBLKPF",
        "cp_async": "LDGSTS",
        "ldg": "LDG",
        "stg": "STG",
        "lds": "LDS",
        "sts": "STS",
        "ldsm": "LDSM",
        "stsm": "STSM",
        "ldtm": "LDTM",
        "sttm": "STTM",
        "ex2": "MUFU.EX2",
        "other_mufu": "MUFU",
        "barrier": "BAR",
        "mbarrier": "SYNCS",
        "atomic": "RED REDG ATOM ATOMG",
        "shared_atomic": "ATOMS",
        "spill_store": "STL",
        "spill_load": "LDL",
    }.items()
}
"""What is counted, by name; of an opcode that stands twice, the one with its modifier wins."""

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)", re.MULTILINE)
_NEVER = ("!PT", "!UPT")
"""Predicates that are never true; ptxas pads with such loads."""

_WIDTH = re.compile(r"\.(?:[US](8|16)|(64|128|256))\b")
_USAGE = re.compile(r"\b(REG|STACK|SHARED):(\d+)")
_CLASS = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}


@dataclass(frozen=True)
class Code:
    """One kernel's machine code. counts: by name of CLASSES; instructions: all that can do anything.

    Padding (NOP, and what is predicated never to run) counts to code_bytes only. spill_stored_bytes
    and spill_loaded_bytes: per thread, of local memory, each instruction once.
    """

    counts: Mapping[str, int]
    instructions: int
    code_bytes: int
    spill_stored_bytes: int
    spill_loaded_bytes: int

    @property
    def spills(self) -> int:
        """Instructions that touch local memory."""
        return self.counts["spill_store"] + self.counts["spill_load"]


@dataclass(frozen=True)
class Usage:
    """What a kernel asks for: registers per thread, bytes of stack per thread and of static shared memory."""

    registers: int
    stack_bytes: int
    static_shared_bytes: int


def count(sass: str) -> Code:
    """Count the instructions of what ``nvdisasm -c`` writes. Raises ValueError for text without any."""
    found = _INSTRUCTION.findall(sass)
    if not found:
        raise ValueError("no instruction in the disassembly")
    real = [opcode for predicate, opcode in found if opcode != "NOP" and predicate not in _NEVER]
    counts, width = Counter[str](), Counter[str]()
    for opcode in real:
        name = _class_of(opcode)
        if name is not None:
            counts[name] += 1
            width[name] += _width(opcode)
    return Code(
        counts={name: counts[name] for name in CLASSES},
        instructions=len(real),
        code_bytes=INSTRUCTION_BYTES * len(found),
        spill_stored_bytes=width["spill_store"],
        spill_loaded_bytes=width["spill_load"],
    )


def usage(text: str, sass: str) -> Usage:
    """Read what ``cuobjdump -res-usage`` writes of one kernel. Raises ValueError for other text.

    Its SHARED includes the bytes that the system reserves where the code, sass, names them
    (from sm_90 on); they are taken out here, as occupancy adds them for every card alike. Of a kernel
    without shared memory the code names them, but SHARED is 0.
    """
    found = {name: int(number) for name, number in _USAGE.findall(text)}
    if found.keys() != {"REG", "STACK", "SHARED"}:
        raise ValueError("no registers in the resource usage")
    reserved = RESERVED_SHARED_BYTES if ".nv.reservedSmem" in sass else 0
    return Usage(found["REG"], found["STACK"], max(0, found["SHARED"] - reserved))


def _class_of(opcode: str) -> str | None:
    """The name under which an opcode with its modifiers is counted."""
    base, _, modifiers = opcode.partition(".")
    return _CLASS.get(f"{base}.{modifiers.partition('.')[0]}") or _CLASS.get(base)


def _width(opcode: str) -> int:
    """Bytes per thread that a load or store moves: its modifier's, else 4."""
    width = _WIDTH.search(opcode)
    return int(width[1] or width[2]) // 8 if width else 4
