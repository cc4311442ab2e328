"""What a call is compared with: the reference, in float64 and, as plain torch, in the case's dtype.

y, and the memory that the call has left; of training all gradients, too. On the tensors that are
timed, of two rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ..family import Results, Work
from .cases import RewriteCase
from .ours import Inputs, RewriteWork

Named = dict[str, Tensor]


def everything(case: RewriteCase, inputs: Inputs, work: Work, got: Named) -> Results:
    """Every row."""
    return _results(inputs.given, inputs.upstream, _whole(case, work, got))


def sample(case: RewriteCase, inputs: Inputs, work: Work, got: Named) -> Results:
    """The first and the last row.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    got = _whole(case, work, got)
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    rows = torch.tensor(sorted({0, case.rows - 1}), device=got["state"].device)
    given = {name: x.detach()[rows] for name, x in inputs.given.items()}
    upstream = tuple(x[rows] for x in inputs.upstream)
    return _results(given, upstream, {name: x[rows] for name, x in got.items()})


def _whole(case: RewriteCase, work: Work, got: Named) -> Named:
    """Results by row; of a call in place the memories lie in the pool, slots backwards."""
    if isinstance(work, RewriteWork) and work.memory is not None:
        memory = {name: x.flip(0) for name, x in work.memory.items()}
        return ({"y": got["y"]} if case.reads else {}) | memory
    return got


def _results(given: Named, upstream: tuple[Tensor, ...], got: Named) -> Results:
    def run(dtype: torch.dtype | None) -> Named:
        cast = {n: x.detach() if dtype is None else x.detach().to(dtype) for n, x in given.items()}
        if upstream:
            cast = {name: x.requires_grad_() for name, x in cast.items()}
        y, state, normalizer = reference.delta_rewrite(**cast)
        found = {"state": state, "normalizer": normalizer}
        found = found if y is None else {"y": y} | found
        if upstream:
            sent = [d.to(x.dtype) for d, x in zip(upstream, found.values(), strict=True)]
            gradients = torch.autograd.grad(list(found.values()), list(cast.values()), sent)
            names = (f"d_{name}" for name in cast)
            found = {name: x.detach() for name, x in found.items()}
            found |= dict(zip(names, gradients, strict=True))
        return found

    return Results(got, run(torch.float64), run(None))
