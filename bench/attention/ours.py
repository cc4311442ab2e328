"""Inputs of an attention case, and our own calls on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import polar_attention, softmax_attention
from ..family import Contender, Work, explained
from .cases import AttentionCase

PARAMETERS = ("null_value", "null_base", "null_slope", "length_gain", "magnitude_gain")


@dataclass
class Inputs:
    """The tensors of one case: leaves that require grad, and upstream gradients.

    q (B, T, Hq, D), k and v (B, T, Hk, D), d_out like q, d_count (B, T, Hq); parameters fp32
    (Hq, D) and (Hq,); cu_seqlens int32 (N+1,) or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: dict[str, Tensor]
    d_out: Tensor
    d_count: Tensor
    cu_seqlens: Tensor | None


def make_inputs(case: AttentionCase, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device.

    The parameters are near trained values: a null mass of 0.2 to 0.4 and counts of 0.1 to 0.5.
    """
    device, dtype = generator.device, case.torch_dtype

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    heads = case.heads_q
    queries = (case.batch, case.tokens, heads, case.head_dim)
    keys = (case.batch, case.tokens, case.heads_k, case.head_dim)
    parameters = {
        "null_value": normal(heads, case.head_dim),
        "null_base": 0.5 * normal(heads),
        "null_slope": 2.0 + 0.2 * normal(heads),
        "length_gain": 0.05 + 0.01 * normal(heads).abs(),
        "magnitude_gain": 0.05 + 0.01 * normal(heads).abs(),
    }
    inputs = Inputs(
        q=normal(*queries, dtype=dtype),
        k=normal(*keys, dtype=dtype),
        v=normal(*keys, dtype=dtype),
        parameters=parameters,
        d_out=normal(*queries, dtype=dtype),
        d_count=normal(*queries[:3], dtype=dtype),
        cu_seqlens=None,
    )
    if case.sequences is not None:
        ends = torch.arange(case.sequences + 1, dtype=torch.int32, device=device)
        inputs.cu_seqlens = ends * case.length
    for leaf in (inputs.q, inputs.k, inputs.v, *parameters.values()):
        leaf.requires_grad_()
    return inputs


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic mode without its fill of fresh memory, an aid to debugging."""
    enabled = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled)


def _rules(case: AttentionCase, inputs: Inputs) -> dict[str, Any]:
    return {
        "window": case.window,
        "cu_seqlens": inputs.cu_seqlens,
        "max_seqlen": case.length if case.sequences is not None else None,
    }


def _polar(
    case: AttentionCase,
    inputs: Inputs,
    backend: str,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Work:
    options = {**inputs.parameters, **_rules(case, inputs), "backend": backend}
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.parameters}
    with context():
        notes = explained(polar_attention, inputs.q, inputs.k, inputs.v, **options)
    return Work(
        forward=lambda: polar_attention(inputs.q, inputs.k, inputs.v, **options),
        leaves=leaves,
        grad_outputs=(inputs.d_out, inputs.d_count),
        context=context,
        notes=notes,
    )


def _softmax(case: AttentionCase, inputs: Inputs, backend: str) -> Work:
    options = {**_rules(case, inputs), "backend": backend}
    return Work(
        forward=lambda: softmax_attention(inputs.q, inputs.k, inputs.v, **options)[:1],
        leaves={"q": inputs.q, "k": inputs.k, "v": inputs.v},
        grad_outputs=(inputs.d_out,),
        notes=explained(softmax_attention, inputs.q, inputs.k, inputs.v, **options),
    )


def contenders(case: AttentionCase, backends: tuple[str, ...]) -> list[Contender]:
    """Our own contenders of a case: its named calls on each backend, then its relatives.

    The first backend's contenders carry plain names, to which the targets refer; others are
    marked "[backend]".
    """
    found = []
    for backend in backends:
        mark = "" if backend == backends[0] else f" [{backend}]"

        def polar(case: AttentionCase, inputs: Inputs, backend: str = backend) -> Work:
            return _polar(case, inputs, backend)

        def fixed(case: AttentionCase, inputs: Inputs, backend: str = backend) -> Work:
            return _polar(case, inputs, backend, deterministic)

        def softmax(case: AttentionCase, inputs: Inputs, backend: str = backend) -> Work:
            return _softmax(case, inputs, backend)

        builds = {"polar": polar, "polar-deterministic": fixed, "softmax": softmax}
        for name in case.contenders:
            function = "softmax" if name == "softmax" else "polar"
            found.append(Contender(name + mark, case, function, builds[name], ours=True))
        for label, other in case.relatives:
            found.append(Contender(f"polar, {label}{mark}", other, "polar", polar, ours=True))
    return found
