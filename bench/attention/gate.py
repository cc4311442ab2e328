"""What an attention call is compared with: the references of `fastweights.reference`.

On small inputs all of it. On the tensors that are timed a tail: the last rows' outputs and dq need
only those rows' scores, and with a causal mask nothing else contributes to the last keys' dk, dv.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..family import Results
from .cases import AttentionCase
from .ours import Inputs

OUTPUTS = ("out", "count")
TAIL = 256  # rows of the full-size check
# Its key heads. One pair of a head can hold most of an fp32 error: over one head the ratio of two
# equally good computations reaches 1.5, over four it stays under 1.2.
HEADS = 4


def _reference(
    function: str,
    dtype: torch.dtype,
    operands: dict[str, Tensor],
    parameters: dict[str, Tensor],
    rules: dict[str, Any],
    grad_outputs: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    """Results and gradients of the reference, operands and parameters in `dtype`, by name."""
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in operands.items()}
    # Below float64 the parameters stay fp32, as the op reads them.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    extra = {n: x.detach().to(wide).requires_grad_() for n, x in parameters.items()}
    call: dict[str, Any] = {**leaves, **rules}
    outputs: tuple[Tensor, ...]
    if function == "polar":
        call.update(extra)
        outputs = reference.polar_attention(**call)[:2]
        leaves.update(extra)
    else:
        outputs = reference.softmax_attention(**call)[:1]
    upstream = tuple(g.to(x.dtype) for g, x in zip(grad_outputs, outputs, strict=True))
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), upstream)
    named: dict[str, Tensor] = dict(zip(OUTPUTS, outputs, strict=False))
    named.update({f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)})
    return named


def whole(
    function: str,
    case: AttentionCase,
    inputs: Inputs,
    grad_outputs: tuple[Tensor, ...],
    got: dict[str, Tensor],
) -> Results:
    """Everything that is returned and every gradient."""
    operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    rules = {"window": case.window, "cu_seqlens": inputs.cu_seqlens}
    truth, plain = (
        _reference(function, dtype, operands, inputs.parameters, rules, grad_outputs)
        for dtype in (torch.float64, case.torch_dtype)
    )
    return Results(got, truth, plain)


def tail(function: str, case: AttentionCase, inputs: Inputs, got: dict[str, Tensor]) -> Results:
    """The last rows of the last batch entry and key heads: the largest offsets."""
    rows = min(TAIL, case.length)
    head = max(case.heads_k - HEADS, 0)
    heads = slice(head * case.group, case.heads_q)
    last = slice(case.tokens - rows, case.tokens)
    operands = {
        "q": inputs.q[-1:, last, heads],
        "k": inputs.k[-1:, case.tokens - case.length :, head:],
        "v": inputs.v[-1:, case.tokens - case.length :, head:],
    }
    parameters = {name: x[heads] for name, x in inputs.parameters.items()}
    upstream: tuple[Tensor, ...] = (inputs.d_out[-1:, last, heads],)
    if function == "polar":
        upstream += (inputs.d_count[-1:, last, heads],)
    rules = {"window": case.window}
    truth, plain = (
        _reference(function, dtype, operands, parameters, rules, upstream)
        for dtype in (torch.float64, case.torch_dtype)
    )
    keys = slice(head, None)
    places = {"out": heads, "d_q": heads, "d_k": keys, "d_v": keys}
    mine = {
        name: _tokens_first(got[name], case)[-1:, last, place]
        for name, place in places.items()
        if name in got
    }
    if function == "polar":
        mine["count"] = got["count"][-1:, last, heads]

    def cut(named: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {"d_k": slice(-rows, None), "d_v": slice(-rows, None)}
        return {name: named[name][:, kept.get(name, slice(None))] for name in mine}

    return Results(mine, cut(truth), cut(plain))


def _tokens_first(x: Tensor, case: AttentionCase) -> Tensor:
    """A result as (B, T, H, D), whichever of the two layouts the call returned.

    The head counts differ from the token count in every case, so the shape says which it is.
    """
    return x if x.shape[1] == case.tokens else x.transpose(1, 2)
