"""What users do without fused products: features to memory, then `torch.bmm`; and a copy.

The features come from our own `polynomial_features`, on a GPU by Triton whatever "auto" is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import polynomial_features
from ..family import Contender, Work, copy_of
from .cases import READ, PolynomialCase
from .ours import Inputs

NAMES = {
    "copy": "a copy of as many bytes as the features have",
    "expanded": "`polynomial_features`, then `torch.bmm`",
}


def contenders(case: PolynomialCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    built = {
        "copy": Contender("copy", case, "copy", _copy, modes=("fwd",), checked=False),
        "expanded": Contender("expanded", case, case.function, _expanded),
    }
    return [built[name] for name in case.peers if name in names]


def _copy(case: PolynomialCase, inputs: Inputs) -> Work:
    return copy_of(inputs.d_out.nbytes, inputs.d_out)


def expanded(case: PolynomialCase, leaves: dict[str, Tensor], backend: str) -> Tensor:
    """A read or an update by the features in memory; products run in the dtype of x.

    Vectors are laid out by heads before they are expanded, so that features lie as products take
    them: a copy of those would take as long as all else.
    """
    x = leaves["x"].transpose(1, 2).contiguous()
    phi = polynomial_features(x, backend=backend).flatten(0, 1)  # (B · H, T, D)
    heads = (case.batch, case.heads)
    if case.function == READ:
        out = torch.bmm(phi, leaves["state"].to(phi.dtype).flatten(0, 1))
        return out.unflatten(0, heads).transpose(1, 2)
    g = leaves["g"].transpose(1, 2).flatten(0, 1)
    out = torch.bmm(phi.mT, g).to(torch.promote_types(phi.dtype, torch.float32))
    return out.unflatten(0, heads)


def _expanded(case: PolynomialCase, inputs: Inputs) -> Work:
    backend = "triton" if case.device == "cuda" else "eager"
    return Work(lambda: (expanded(case, inputs.leaves, backend),), inputs.leaves, (inputs.d_out,))
