"""Groups of chunks: what passes from one to the next, on the way and on the way back.

Their maps come from eager in float64, as `omega_maps` lays them out; it runs on a GPU alone, as do
the walks of groups, see `test_omega_gpu.py`.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import ops
from fastweights.autotune import Config
from fastweights.ops.omega import groups as launches
from fastweights.ops.omega.triton_forward import Call
from helpers.omega import Case, shape_of, tensors_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_omega_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

TILE = 64
CASE = Case(
    batch=2, tokens=7 * TILE + 5, heads=2, width=5, values=70, chunk_size=TILE, momentum=False
)
CASES = [
    CASE.but(window=4),
    CASE.but(carried=True, window=4),
    CASE.but(batch=1, tokens=8 * TILE, width=70, values=3, decay=False, gates=False, window=1),
    CASE.but(tokens=4 * TILE, read_before=True, carried=True),  # without chunks for the last groups
    CASE.but(inner_loss="dot", carried=True),
]


class Pieces:
    """One call on any of its tokens, from any memory, with what is in front of them."""

    def __init__(self, case: Case) -> None:
        self.given = case.arguments(0, torch.float64, torch.device("cpu"))
        self.tokens = case.tokens
        self.older = case.window - 1

    def run(self, begin: int, end: int, state: Tensor | None, **other: Tensor) -> Any:
        """y, and what is left, of tokens begin … end − 1."""
        given = self.given | other
        names = ("q", "k", "v", "step", "decay", "window_gates")
        piece = {n: given[n][:, begin:end] for n in names if given.get(n) is not None}
        rules = ("window", "chunk_size", "inner_loss", "read_before")
        piece |= {name: given[name] for name in rules if name in given}
        if begin > 0 and self.older > 0:
            piece |= {f"tail_{n}": given[n][:, begin - self.older : begin] for n in "kv"}
        elif begin == 0:
            tails = ("tail_k", "tail_v", "tail_length")
            piece |= {n: given[n] for n in tails if given.get(n) is not None}
        call = {"initial_state": state, "return_state": True, "backend": "eager"}
        y, left = ops.omega_memory(**piece, **call)
        return y, left.state


def edges_of(tokens: int, groups: int) -> list[int]:
    """The first token of each group, and the last one's end."""
    length = math.ceil(math.ceil(tokens / TILE) / groups) * TILE
    return [min(group * length, tokens) for group in range(groups)] + [tokens]


def set_up(case: Case, groups: int) -> tuple[Call, Pieces, Tensor]:
    """A call in fp32, the same in float64, and maps of its groups; what no one reads is NaN."""
    single = case.arguments(0, torch.float32, torch.device("cpu"))
    config = Config.make(GROUPS=groups)
    call = Call(shape_of(single), tensors_of(single), config=config)
    pieces = Pieces(case)
    pieces.given |= {
        name: x.double() if x.is_floating_point() else x
        for name, x in single.items()
        if isinstance(x, Tensor)
    }
    wide = -(-case.width // TILE) * TILE
    rows = wide + -(-case.values // TILE) * TILE
    maps = torch.full((case.batch, groups, case.heads, rows, wide), float("nan"))
    v = pieces.given["v"]
    edges = edges_of(case.tokens, groups)
    for group in range(groups - 1):
        begin, end = edges[group : group + 2]
        state = pieces.given.get("initial_state") if group == 0 else None
        _, offset = pieces.run(begin, end, state)
        found = maps[:, group]
        found[:, :, wide:] = 0
        found[:, :, wide : wide + case.values, : case.width] = offset.mT
        if group > 0:
            nothing = v.new_zeros(*v.shape[:3], case.width)
            unit = torch.eye(case.width, dtype=v.dtype).expand(case.batch, case.heads, -1, -1)
            _, slope = pieces.run(begin, end, unit.contiguous(), v=nothing)
            found[:, :, :wide] = torch.eye(wide)  # padding meets no key, and never decays here
            found[:, :, : case.width, : case.width] = slope.mT
    return call, pieces, maps.flatten(0, 1)


def assert_close(got: Tensor, truth: Tensor) -> None:
    assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memories_at_the_begins_of_groups(case: Case, groups: int) -> None:
    call, pieces, maps = set_up(case, groups)
    begins = launches.begins_of_groups(call, maps).unflatten(0, (case.batch, groups))
    initial = pieces.given.get("initial_state")
    for group, edge in enumerate(edges_of(case.tokens, groups)[:-1]):
        truth = initial
        if edge > 0:
            _, truth = pieces.run(0, edge, initial)
        if truth is None:
            assert not begins[:, group].any()
        else:
            assert_close(begins[:, group], truth)


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_at_the_ends_of_groups(case: Case, groups: int) -> None:
    call, pieces, maps = set_up(case, groups)
    of_state = (case.batch, case.heads, case.width, case.values)
    d_last = torch.randn(of_state)
    d_y = torch.randn(pieces.given["v"].shape)

    def slope(begin: int, end: int, d_end: Tensor | None) -> Tensor:
        """Gradient of the memory in front of tokens begin … end − 1."""
        if begin == end:
            return torch.zeros(of_state).double() if d_end is None else d_end.double()
        state = torch.zeros(of_state, dtype=torch.float64, requires_grad=True)
        y, left = pieces.run(begin, end, state)
        loss = (y * d_y[:, begin:end]).sum()
        if d_end is not None:
            loss = loss + (left * d_end).sum()
        return torch.autograd.grad(loss, state)[0]

    edges = edges_of(case.tokens, groups)
    d_begins = torch.full((case.batch, groups, *of_state[1:]), float("nan"))
    for group in range(1, groups):
        d_end = d_last if group == groups - 1 else None
        d_begins[:, group] = slope(edges[group], edges[group + 1], d_end)
    ends = launches.ends_of_groups(call, maps, d_last, d_begins.flatten(0, 1))
    ends = ends.unflatten(0, (case.batch, groups))
    for group in range(groups):
        assert_close(ends[:, group], slope(edges[group + 1], case.tokens, d_last))
