"""Inputs of a case, and our own calls on them.

A `Contender` can be built on any inputs of the same kind: the gate builds it on a small case
first. What it builds is a `Work`: a forward that can be captured and the tensors whose gradients
the backward asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops import explain, polar_attention, softmax_attention
from .cases import Case

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


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
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


@dataclass
class Work:
    """A call ready to be run, captured and differentiated.

    Attributes:
        forward: runs the call and returns the outputs that receive gradients, (B, T, Hq, D) and
            whatever else.
        leaves: gradients are taken with respect to these, by name.
        grad_outputs: upstream gradients, one an output.
        context: entered around every forward, backward and capture.
        notes: what the record should keep (backend, configs).
    """

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: dict[str, Tensor]
    grad_outputs: tuple[Tensor, ...]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    notes: dict[str, Any] = field(default_factory=dict)

    def backward(self, outputs: tuple[Tensor, ...], *, retain: bool = True) -> tuple[Tensor, ...]:
        """Gradients of all leaves; with `retain`, `outputs` can be differentiated again."""
        return torch.autograd.grad(
            outputs, tuple(self.leaves.values()), self.grad_outputs, retain_graph=retain
        )


@dataclass(frozen=True)
class Contender:
    """One row of a table: a name, the sizes it is counted at, and how to build it.

    Attributes:
        name: shown and recorded.
        case: its FLOPs and bytes are this case's (a relative's own).
        function: "polar" or "softmax": the reference that the gate takes.
        build: from a case and its inputs to a `Work`.
        ours: our own op; the gate then also checks parameters, on poisoned memory.
        reason: why it cannot run here, or None.
    """

    name: str
    case: Case
    function: str
    build: Callable[[Case, Inputs], Work]
    ours: bool = False
    reason: str | None = None


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


def _rules(case: Case, inputs: Inputs) -> dict[str, Any]:
    return {
        "window": case.window,
        "cu_seqlens": inputs.cu_seqlens,
        "max_seqlen": case.length if case.sequences is not None else None,
    }


def _notes(function: Callable[..., Any], inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    said = explain(function, inputs.q, inputs.k, inputs.v, **options)
    return {
        "backend": said.backend,
        "configs": {pass_: config.name for pass_, config in said.configs.items()},
    }


def _polar(
    case: Case,
    inputs: Inputs,
    backend: str,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Work:
    options = {**inputs.parameters, **_rules(case, inputs), "backend": backend}
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.parameters}
    with context():
        notes = _notes(polar_attention, inputs, options)
    return Work(
        forward=lambda: polar_attention(inputs.q, inputs.k, inputs.v, **options),
        leaves=leaves,
        grad_outputs=(inputs.d_out, inputs.d_count),
        context=context,
        notes=notes,
    )


def _softmax(case: Case, inputs: Inputs, backend: str) -> Work:
    options = {**_rules(case, inputs), "backend": backend}
    return Work(
        forward=lambda: softmax_attention(inputs.q, inputs.k, inputs.v, **options)[:1],
        leaves={"q": inputs.q, "k": inputs.k, "v": inputs.v},
        grad_outputs=(inputs.d_out,),
        notes=_notes(softmax_attention, inputs, options),
    )


def contenders(case: Case, backends: tuple[str, ...] = ("auto",)) -> list[Contender]:
    """Our own contenders of a case: its named calls on each backend, then its relatives.

    The first backend's contenders carry plain names, to which the targets refer; others are
    marked "[backend]".
    """
    found = []
    for backend in backends:
        mark = "" if backend == backends[0] else f" [{backend}]"

        def polar(case: Case, inputs: Inputs, backend: str = backend) -> Work:
            return _polar(case, inputs, backend)

        def fixed(case: Case, inputs: Inputs, backend: str = backend) -> Work:
            return _polar(case, inputs, backend, deterministic)

        def softmax(case: Case, inputs: Inputs, backend: str = backend) -> Work:
            return _softmax(case, inputs, backend)

        builds = {"polar": polar, "polar-deterministic": fixed, "softmax": softmax}
        for name in case.contenders:
            function = "softmax" if name == "softmax" else "polar"
            found.append(Contender(name + mark, case, function, builds[name], ours=True))
        for label, other in case.relatives:
            found.append(Contender(f"polar, {label}{mark}", other, "polar", polar, ours=True))
    return found
