"""Newton–Schulz by torch's batched products, which is what users of Muon run.

    X = S / (‖S‖ + eps)
    each step:   A = X Xᵀ    Z = b A + c A²    X ← a X + Z X

in the dtype of the input throughout: `torch.bmm` for A, `torch.baddbmm` for the other two, rows the
shorter side. Backward is autograd through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..family import Contender, Work
from .cases import EPS, NewtonSchulzCase
from .ours import Inputs

NAMES = {
    "eager": "NS5 by torch.baddbmm in the dtype of the input",
    "compiled": "the same under torch.compile",
    "matmul-floor": "its matrix products alone, into outputs that exist",
}


def eager(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """The iteration on a stack (B, m, n)."""
    tall = x.shape[1] > x.shape[2]
    iterate = _normalised(x.mT if tall else x)
    for a, b, c in triples:
        gram = torch.bmm(iterate, iterate.mT)
        z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        iterate = torch.baddbmm(iterate, z, iterate, beta=a)
    return iterate.mT if tall else iterate


def _normalised(x: Tensor) -> Tensor:
    return x / (x.norm(dim=(1, 2), keepdim=True) + EPS)


def contenders(case: NewtonSchulzCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    built = {
        "eager": Contender("eager", case, case.op, _eager),
        "compiled": Contender("compiled", case, case.op, _compiled),
        "matmul-floor": Contender(
            "matmul-floor", case, "products", _floor, modes=("fwd",), checked=False
        ),
    }
    return [built[name] for name in case.peers if name in names]


def _work(case: NewtonSchulzCase, inputs: Inputs, call: Callable[..., Tensor]) -> Work:
    triples = case.triples
    return Work(lambda: (call(inputs.x, triples),), {"x": inputs.x}, (inputs.d_out,))


def _eager(case: NewtonSchulzCase, inputs: Inputs) -> Work:
    return _work(case, inputs, eager)


def _compiled(case: NewtonSchulzCase, inputs: Inputs) -> Work:
    from torch._functorch import config

    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(eager, dynamic=False, fullgraph=True)
    work = _work(case, inputs, compiled)
    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        outputs = work.forward()
        if case.modes != ("fwd",):
            work.backward(outputs)
    return work


def _floor(case: NewtonSchulzCase, inputs: Inputs) -> Work:
    """Three products a step on numbers of the size that they have in the iteration."""
    x = inputs.x.detach()
    left = _normalised(x.mT if case.rows > case.cols else x)
    gram = torch.bmm(left, left.mT)
    z, out = torch.empty_like(gram), torch.empty_like(left)

    def forward() -> tuple[Tensor, ...]:
        for _ in range(case.steps):
            torch.bmm(left, left.mT, out=gram)
            torch.bmm(gram, gram, out=z)
            torch.bmm(z, left, out=out)
        return (out,)

    return Work(forward, {}, ())
