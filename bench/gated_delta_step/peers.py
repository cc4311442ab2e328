"""A copy of as many bytes as a step moves, and memories taken out of a pool and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..family import Contender, Work, copy
from .cases import DeltaStepCase
from .ours import Inputs, in_place, ours

NAMES = {
    "copy": "a copy of half as many bytes, each read and written",
    "eager": "the op's eager backend",
    "gathered": "`pool[slots]`, a step in plain torch, `pool.index_copy_`",
    "compiled": "the same under torch.compile",
}


def gathered(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state_pool: Tensor,
    slots: Tensor, *, scale: float,
) -> Tensor:  # fmt: skip
    """o of `gated_delta_step_` without rows to skip; the pool is written."""
    heads, dtype, acc = beta.shape[1], v.dtype, state_pool.dtype
    q, k, v = (x.to(acc).repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    query, key = (normalize(x, dim=-1)[..., None] for x in (q, k))
    state = log_decay.exp()[..., None, None] * state_pool[slots]
    change = beta[..., None] * (v - (key * state).sum(-2))
    state = state + key * change[..., None, :]
    state_pool.index_copy_(0, slots, state)
    return (scale * (query * state).sum(-2)).to(dtype)


def contenders(case: DeltaStepCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    forward = {"modes": ("fwd",)}
    built = {
        "copy": Contender("copy", case, "copy", _copy, checked=False, **forward),
        "eager": Contender("eager", case, case.op, lambda c, i: ours(c, i, "eager"), **forward),
        "gathered": Contender("gathered", case, case.op, _gathered, **forward),
        "compiled": Contender("compiled", case, case.op, _compiled, **forward),
    }
    return [built[name] for name in case.peers if name in names]


def _copy(case: DeltaStepCase, inputs: Inputs) -> Work:
    return copy(case, inputs.given["q"])


def _gathered(case: DeltaStepCase, inputs: Inputs) -> Work:
    return in_place(inputs, gathered)


def _compiled(case: DeltaStepCase, inputs: Inputs) -> Work:
    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(gathered, dynamic=False, fullgraph=True)
    compiled(**inputs.given | {"state_pool": inputs.given["state_pool"].clone()})
    return in_place(inputs, compiled)
