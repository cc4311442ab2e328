"""What the delta rewrite is timed beside: a copy, a large product, and plain torch compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import flops
from ..family import Contender, Work, copy
from .cases import FUNCTIONAL, ORDER, RewriteCase
from .ours import Inputs

NAMES = {
    "copy": "a copy of half as many bytes, each read and written",
    "matmul": "one large torch.matmul: the rate of tensor cores",
    "compiled": "the formula in plain torch as one graph, under torch.compile",
}


def plain(
    k: Tensor, v: Tensor, beta: Tensor, state: Tensor, normalizer: Tensor, q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What one would hand to torch.compile: products with the memory run in the dtype of k."""
    acc = state.dtype
    eps = 1e-5
    f, g = (_features(x.transpose(1, 2).to(acc)) for x in (k, q))  # (B, H, ·, P)
    d = f @ normalizer[..., None] + eps
    gamma = (1 - d / f.square().sum(-1, keepdim=True)).clamp(0, 1).detach()
    half = f.to(k.dtype)
    old = (half @ state.to(k.dtype)).to(acc) / d
    change = beta.transpose(1, 2)[..., None] * (v.transpose(1, 2).to(acc) - old)
    state = state + (half.mT @ change.to(k.dtype)).to(acc)
    normalizer = normalizer + (f.mT @ gamma)[..., 0]
    read = (g.to(k.dtype) @ state.to(k.dtype)).to(acc)
    y = read / (g @ normalizer[..., None] + eps)
    return y.transpose(1, 2).to(v.dtype), state, normalizer


def _features(x: Tensor) -> Tensor:
    r = torch.cat((x.relu(), (-x).relu()), -1)
    h = torch.cat([r * r.roll(j, -1) for j in range(1, ORDER + 1)], -1)
    return h / torch.linalg.vector_norm(h, dim=-1, keepdim=True).clamp(min=1e-12)


@dataclass(frozen=True)
class MatmulCase(RewriteCase):
    """A case whose FLOPs are those of a square product of `side`."""

    side: int = 4096

    def flops(self, mode: str) -> int:
        """Of the product."""
        return flops.matmul(self.side, self.side, self.side)

    def bytes(self, mode: str) -> int:
        """Of the three matrices."""
        return 3 * self.side**2 * self.torch_dtype.itemsize


def contenders(case: RewriteCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    counted = MatmulCase(**vars(case), side=4096 if case.device == "cuda" else 256)
    built = {
        "copy": Contender("copy", case, "copy", _copy, modes=("fwd",), checked=False),
        "matmul": Contender("matmul", counted, "matmul", _matmul, modes=("fwd",), checked=False),
        "compiled": Contender(
            "compiled", case, case.op, _compiled, modes=("fwd", "bwd") if case.trained else ("fwd",)
        ),
    }
    return [built[name] for name in case.peers if name in names]


def _copy(case: RewriteCase, inputs: Inputs) -> Work:
    return copy(case, inputs.given["k"])


def _matmul(case: MatmulCase, inputs: Inputs) -> Work:
    k = inputs.given["k"]
    a, b = torch.randn(2, case.side, case.side, device=k.device).to(k.dtype)
    out = torch.empty_like(a)

    def forward() -> tuple[Tensor, ...]:
        return (torch.matmul(a, b, out=out),)

    return Work(forward, {}, (k,))


def _compiled(case: RewriteCase, inputs: Inputs) -> Work:
    assert case.function == FUNCTIONAL
    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    call: Any = torch.compile(plain, dynamic=False, fullgraph=True)

    if case.trained:
        return _trained(inputs, call)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(call(**inputs.given))

    forward()
    return Work(forward, {}, (inputs.given["k"],))


def _trained(inputs: Inputs, call: Any) -> Work:
    from torch._functorch import config

    work = Work(lambda: tuple(call(**inputs.given)), inputs.given, inputs.upstream)
    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        work.backward(work.forward())
    return work
