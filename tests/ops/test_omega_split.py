"""Short chunks in tiles, on the CPU: what the walk by tiles is fed with, against the loops.

The walk itself is in Gluon and runs on a GPU alone, see `test_omega_gpu.py`. Here float64 takes its
place; the kernels in front of it are Triton's, and run under the interpreter.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import reference
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from helpers.omega import Case, shape_of, tensors_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_omega_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

TILE = 64
CASE = Case(
    batch=1, tokens=150, heads=2, width=16, values=24, window=4, chunk_size=16, momentum=False
)
CASES = [
    CASE.but(carried=True),
    CASE.but(window=1, gates=False, decay=False),
    CASE.but(window=5, read_before=True, batch=2, tokens=70),
    CASE.but(packed=(0, 5, 5, 75, 140), carried=True),
    CASE.but(chunk_size=32, window=17, carried=True, decay=False),
    CASE.but(chunk_size=32, packed=(0, 64, 139), read_before=True),
    CASE.but(chunk_size=8, window=3, gates=False),
    CASE.but(chunk_size=8, packed=(0, 9, 81), carried=True, tokens=83),
]


def launched(case: Case) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """A call by the kernels for Hopper, its arguments, its tables, and what `omega_solve` left."""
    from fastweights.ops.omega.hopper_forward import HopperForward

    given = case.arguments(0, torch.float16, torch.device("cpu"))
    with assume_device(target_device("sm_90")):
        call = HopperForward(shape_of(given), tensors_of(given))
    assert call.config.get("HOPPER")
    assert call.parts == TILE // case.chunk_size
    call.gates(bounded=True)
    tables = call.tables()
    return call, given, tables, call.solve(tables)


def tile_of(x: Tensor, batch: int, first: int, size: int) -> Tensor:
    """Tokens of a tile (H, TILE, ·) in float64, zeros behind them."""
    tile = x.new_zeros(x.shape[2], TILE, x.shape[3], dtype=torch.float64)
    tile[:, :size] = x[batch, first : first + size].transpose(0, 1)
    return tile


def joined(own: Tensor | None, older: Tensor | None, dim: int) -> Tensor:
    """Own rows, then older ones, in float64."""
    return torch.cat([x.double() for x in (own, older) if x is not None], dim)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_walk_by_tiles(case: Case) -> None:
    """R = E − S E, all reads and the memory at the tile's end."""
    call, given, tables, solved = launched(case)
    halo = call.halo
    ends = case.packed or (0, case.tokens)
    y = torch.zeros(given["v"].shape, dtype=torch.float64)
    left = []
    for sequence in range(case.sequences):
        batch = 0 if case.packed else sequence
        begin, end = ends[sequence : sequence + 2] if case.packed else (0, case.tokens)
        slot0 = begin // TILE + sequence if case.packed else sequence * call.chunks
        M = torch.zeros(case.heads, case.width, case.values, dtype=torch.float64)
        if case.carried:
            M = given["initial_state"][sequence].double()
        for number, first in enumerate(range(begin, end, TILE)):
            size, slot = min(TILE, end - first), slot0 + number
            q, k, v = (tile_of(given[name], batch, first, size) for name in ("q", "k", "v"))
            if halo:
                k = joined(k, solved["k_older"][slot].transpose(0, 1), 1)
                v = joined(v, solved["v_older"][slot].transpose(0, 1), 1)
            begins, writes = (
                torch.cat((x[slot, :, halo:], x[slot, :, :halo]), 1).double()
                for x in (solved["begins"], call.edges["writes"])
            )
            E = begins[..., None] * (k @ M) - v
            R = E + solved["solved"][slot].double() @ E
            older = tables["shares_older"][slot] if halo else None
            P = joined(tables["shares_own"][slot], older, -1)
            read = tables["rates"][slot].double()[..., None] * (q @ M) - (P * (q @ k.mT)) @ R
            read = tables["scales"][slot].double()[..., None] * read
            y[batch, first : first + size] = read[:, :size].transpose(0, 1)
            M = call.edges["ends"][slot, :, 0].double()[:, None, None] * M
            M = M - k.mT @ (writes[..., None] * R)
        left.append(M)

    exact = {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in given.items()
    }
    truth, state = reference.omega_memory(**exact, return_state=True)
    there = slice(None) if case.packed is None else slice(case.packed[-1])
    error = (y - truth)[:, there].norm() / truth[:, there].norm()
    assert error < 2**-11, f"y, whose P and S are fp16: {error:.1e}"
    error = (torch.stack(left) - state.state).norm() / state.state.norm()
    assert error < 2**-12, f"M, for which S alone is: {error:.1e}"


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_nothing_goes_back(case: Case) -> None:
    """S leads from each chunk to later ones alone: all else of it is written, as zeros."""
    call, _, _, solved = launched(case)
    each = call.halo // call.parts
    chunk = torch.arange(TILE) // case.chunk_size
    if each:
        chunk = torch.cat((chunk, torch.arange(call.halo) // each))
    later = chunk[:, None] > chunk[None, :]
    for sequence, number in itertools.product(range(case.sequences), range(call.chunks)):
        block = solved["solved"][sequence * call.chunks + number]
        assert block.masked_fill(later, 0).eq(0).all()
        assert block.masked_fill(~later, 0).isfinite().all()
        assert block.masked_fill(~later, 0).ne(0).any()
