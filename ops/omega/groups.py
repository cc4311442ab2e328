"""Few heads: a sequence in groups of chunks that run side by side, as if packed.

From its begin to its end a group changes the memory by an affine map, M → T M + O, whatever M is:

    1. every group from [I | 0], with values [0 | V], leaves [T | O]
    2. M at each group's begin, by one small product after the other
    3. every group from there

so that the walk along a sequence is 2 / groups as long, and there are groups times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .op import OmegaShape, OmegaTensors

TILE = 64  # tokens that a walk takes at once, and at least those of a group

Run = Callable[[OmegaShape, OmegaTensors], tuple[Tensor, Tensor, Tensor | None]]


def in_groups(
    shape: OmegaShape, given: OmegaTensors, groups: int, run: Run
) -> tuple[Tensor, Tensor, None]:
    """y (B, T, H, Dv) and M (N, H, D, Dv) after the last token, of a call without momentum.

    run: a forward of packed sequences, such as a backend's `fwd`.
    """
    assert not shape.packed
    assert not shape.momentum
    packed, initial = _packed(shape, given, groups)
    sequences, heads, wide, values = shape.batch, shape.heads, shape.wide, shape.values
    each = replace(shape, batch=sequences * groups, tokens=sequences * shape.tokens, packed=True)

    def beside(x: Tensor) -> Tensor:
        return torch.cat((x.new_zeros(*x.shape[:3], wide), x), 3)

    start = torch.eye(wide, wide + values, dtype=initial.dtype, device=initial.device)
    maps = packed._replace(
        v=beside(packed.v), tail_v=None if packed.tail_v is None else beside(packed.tail_v),
        initial_state=start.expand(each.batch, heads, wide, wide + values).contiguous(),
    )  # fmt: skip
    _, left, _ = run(replace(each, values=wide + values), maps)
    slope, offset = left.unflatten(0, (sequences, groups)).split((wide, values), -1)

    begins = [initial]
    for group in range(groups - 1):
        begins.append(slope[:, group] @ begins[-1] + offset[:, group])
    y, state, _ = run(each, packed._replace(initial_state=torch.stack(begins, 1).flatten(0, 1)))
    last = state.unflatten(0, (sequences, groups))[:, -1]
    return y.view(given.v.shape), last.contiguous(), None


def _packed(shape: OmegaShape, given: OmegaTensors, groups: int) -> tuple[OmegaTensors, Tensor]:
    """The groups of all sequences as packed ones, and M at the begin of each sequence.

    A group has whole chunks, but for the last one; there may be empty ones behind it.
    """
    device, older = given.k.device, shape.window - 1
    unit = shape.chunk_size * max(1, TILE // shape.chunk_size)
    length = -(-shape.tokens // (groups * unit)) * unit
    first = torch.arange(groups, device=device) * length
    row = torch.arange(shape.batch, device=device)[:, None] * shape.tokens
    starts = (row + first.clamp(max=shape.tokens)).flatten()
    end = starts.new_full((1,), shape.batch * shape.tokens)

    fields = ("q", "k", "v", "step", "decay", "window_gates")
    tokens = {name: x for name in fields if (x := getattr(given, name)) is not None}
    flat: dict[str, Any] = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in tokens.items()}
    packed = given._replace(cu_seqlens=torch.cat((starts, end)).to(torch.int32), **flat)
    if older > 0:
        before = starts[:, None] + torch.arange(-older, 0, device=device)
        before = before.clamp(0, max(shape.batch * shape.tokens - 1, 0))
        known = torch.full((shape.batch, groups), older, dtype=torch.int32, device=device)
        known[:, 0] = 0 if given.tail_k is None else older
        if given.tail_length is not None:
            known[:, 0] = given.tail_length
        tails: dict[str, Any] = {"tail_length": known.flatten()}
        for name, x, tail in (
            ("tail_k", packed.k, given.tail_k), ("tail_v", packed.v, given.tail_v)
        ):  # fmt: skip
            tails[name] = x[0, before]
            if tail is not None:
                tails[name].unflatten(0, (shape.batch, groups))[:, 0] = tail
        packed = packed._replace(**tails)
    zero = given.empty_state(shape) if given.initial_state is None else given.initial_state
    return packed, zero
