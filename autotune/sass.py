"""Faults of matrix products that show in the machine code alone (`nvdisasm -c`)."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

_LABEL = re.compile(r"(\.\w+):\s*$")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([\w.]+)\s*(.*?)\s*;")
_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"]*)\"")
_WGMMA = re.compile(r"\b(HGMMA\.|WARPGROUP\.ARRIVE|WARPGROUP\.DEPBAR\.LE(?! gsb0, 0x[1-9a-f]))")
# Uniform instructions that set no uniform register, though they name some.
_SET_NONE = ("UISETP", "UPLOP3", "USETMAXREG", "UTMA", "UBLK", "USYNC", "UCGABAR")


def serial_wgmma(code: str) -> bool:
    """Whether ptxas gave up on asynchronous wgmma in a stretch of machine code between labels.

    It then puts a WARPGROUP.ARRIVE before and a WARPGROUP.DEPBAR behind each HGMMA; a healthy loop
    has one pair for a whole product, 4 HGMMA or more. Shorter products tell nothing, nor does a
    DEPBAR that leaves some running (`gsb0, 0x3`), or one that no HGMMA is right in front of.
    """
    for stretch in re.split(r"^\.\w+:", code, flags=re.MULTILINE):
        steps = _WGMMA.findall(stretch)
        products = steps.count("HGMMA.")
        waits = sum(
            first == "HGMMA." and then.startswith("WARPGROUP.DEPBAR")
            for first, then in itertools.pairwise(steps)
        )
        if products >= 4 and waits >= 0.6 * products:
            return True
    return False


def unset_descriptors(code: str) -> list[str]:
    """The wgmma whose matrix descriptor some path from the entry leaves unset.

    Seen of the ptxas in Triton 3.6: where two loops multiply the same tile, it sets the descriptor
    before the first loop only, behind the branch that skips that loop if it has no turns; the
    second then reads what the registers held before. Or it forms a descriptor ahead of a loop from
    a register that is set behind it. What is formed from something unset is itself unset.
    """
    program = _parse(code)
    known: list[set[int] | None] = [None] * len(program)
    pending = [0] if program else []
    if program:
        known[0] = set()
    while pending:
        at = pending.pop()
        here = known[at]
        assert here is not None
        after = program[at].leaves(here)
        for target in program[at].goes_to:
            before = known[target]
            both = after if before is None else before & after
            if both != before:
                known[target] = set(both)
                pending.append(target)
    return [
        instruction.text
        for instruction, before in zip(program, known, strict=True)
        if before is not None and not instruction.descriptors <= before
    ]


@dataclass
class _Instruction:
    """One machine instruction: uniform registers that it sets, from which, and its descriptors'."""

    text: str
    sets: set[int]
    reads: set[int]
    descriptors: set[int]
    goes_to: list[int] = field(default_factory=list)

    def leaves(self, known: set[int]) -> set[int]:
        """The registers that hold something after it."""
        return known | self.sets if self.reads <= known else known - self.sets


def _parse(code: str) -> list[_Instruction]:
    """The instructions of a kernel with their successors."""
    labels: dict[str, int] = {}
    lines: list[tuple[str | None, str, str, str]] = []
    for line in code.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(lines)
        elif found := _INSTRUCTION.match(line):
            lines.append((found[1], found[2], found[3], line))
    program = []
    for i, (predicate, name, operands, line) in enumerate(lines):
        text = f"{name} {operands}"
        sets = _sets(name, operands)
        reads = _reads(name, operands) if sets else set()
        instruction = _Instruction(text, sets, reads, _descriptors(name, operands))
        targets = _targets(name, line)
        instruction.goes_to = [labels[target] for target in targets if target in labels]
        leaves = name.startswith(("EXIT", "RET")) or (name.startswith("BRA") and targets)
        conditional = predicate is not None or re.match(r"!?U?P\w+,", operands)
        if not leaves or conditional:
            instruction.goes_to.append(i + 1)
        instruction.goes_to = [target for target in instruction.goes_to if target < len(lines)]
        program.append(instruction)
    return program


def _targets(name: str, line: str) -> list[str]:
    """Labels that a branch may lead to."""
    if name.startswith("BRX"):
        listed = _TARGETS.search(line)
        return listed[1].split(",") if listed else []
    return re.findall(r"`\((\.\w+)\)", line) if name.startswith("BRA") else []


def _sets(name: str, operands: str) -> set[int]:
    """Uniform registers that an instruction sets; predicates come before them."""
    if not name.startswith(("U", "R2UR", "S2UR", "VOTEU", "CS2UR")) or name.startswith(_SET_NONE):
        return set()
    found = re.match(r"(?:U?P\w+,\s*)*UR(\d+)", operands)
    if found is None:
        return set()
    first = int(found[1])
    wide = ".64" in name or ".WIDE" in name
    return {first, first + 1} if wide else {first}


def _reads(name: str, operands: str) -> set[int]:
    """Uniform registers from which an instruction forms the one that it sets."""
    sources = re.findall(r"UR(\d+)", operands)[1:]
    wide = ".64" in name  # .WIDE is of the result alone
    return {int(source) + more for source in sources for more in range(1 + wide)}


def _descriptors(name: str, operands: str) -> set[int]:
    """Uniform registers of an HGMMA's descriptors: two each, first the left one, then the right.

    With the left operand in registers the instruction names the same four, and reads the last two.
    """
    found = re.match(r"R\d+, (R\d+, )?gdesc\[UR(\d+)\]", operands)
    if not name.startswith("HGMMA") or found is None:
        return set()
    first = int(found[2])
    return set(range(first + (2 if found[1] else 0), first + 4))
