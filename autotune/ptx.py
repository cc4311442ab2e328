"""What PTX says of a kernel: its matrix instruction, and a fault of shared memory."""

from __future__ import annotations

import re

_BASE = re.compile(r"mov\.[bu]32\s+(%r\d+), global_smem;")
_OFFSET = re.compile(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);")
_INIT = re.compile(r"mbarrier\.init\.\S+ \[\s*([^\]]*?)\s*\]")
_END = re.compile(r"mbarrier\.inval\.\S+ \[\s*([^\]]*?)\s*\]")
_DATA = re.compile(
    r"\b(?:ld|st)\.(?:volatile\.)?shared\S*?(?:\.v(\d))?\.[a-z]+(\d+)\s[^\[;]*\[\s*([^\]]*?)\s*\]"
)
_BARRIER_BYTES = 8


def matrix_instruction(ptx: str) -> str:
    """The best of wgmma, tcgen05 and mma that a kernel uses; fma where there is none."""
    for instruction, name in (
        ("wgmma.mma_async", "wgmma"),
        ("tcgen05.mma", "tcgen05"),
        ("mma.sync", "mma"),
    ):
        if instruction in ptx:
            return name
    return "fma"


def shared_barriers(ptx: str) -> list[int]:
    """Addresses in the shared memory of a Triton kernel that hold data in a barrier's words.

    A barrier that a variant of a kernel sets up and never uses lives no longer than that for
    Triton, which gives its words to the scratch of other instructions. Barriers that are
    invalidated are left out: Triton then gives their words away afterwards only. Only addresses
    that are constants are seen, as those of scratch are.
    """
    base = set(_BASE.findall(ptx))
    offsets = {name: int(n) for name, of, n in _OFFSET.findall(ptx) if of in base}
    offsets |= dict.fromkeys(base, 0)

    def address(operand: str) -> int | None:
        """That of an operand such as "%r7 + 8"; None where it is no constant."""
        name, _, more = (part.strip() for part in operand.partition("+"))
        start = 0 if name == "global_smem" else offsets.get(name)
        return None if start is None else start + int(more or 0)

    ended = {address(operand) for operand in _END.findall(ptx)}
    placed = {address(operand) for operand in _INIT.findall(ptx)} - ended
    barriers = [start for start in placed if start is not None]
    found = set()
    for parts, bits, operand in _DATA.findall(ptx):
        first, size = address(operand), int(parts or 1) * int(bits) // 8
        if first is not None and any(
            first < barrier + _BARRIER_BYTES and barrier < first + size for barrier in barriers
        ):
            found.add(first)
    return sorted(found)
