"""Inputs of an Omega case, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...ops import omega_memory
from ..cases import MODES
from ..family import Contender, Work, explained
from .cases import OmegaCase


@dataclass
class Inputs:
    """The leaves of a call by the names of its arguments, and the upstream gradient.

    q, k, v and d_out (B, T, H, D); step, decay and, where the case has it, momentum (B, T, H), and
    window_gates (B, T, H, window), fp32.
    """

    leaves: dict[str, Tensor]
    d_out: Tensor


def make_inputs(case: OmegaCase, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device: decays from 0.9 on, gates 1/window on average.

    The longer the chunk, the larger the step that its tokens make together: each is at most
    1/√chunk_size, half of which is where the step rule of a layer starts for tokens that differ.
    """
    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    rows = (case.batch, case.tokens, case.heads)

    def normal() -> Tensor:
        size = (*rows, case.width)
        device, dtype = generator.device, case.torch_dtype
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    def between(low: float, high: float, *size: int) -> Tensor:
        x = torch.rand(*rows, *size, generator=generator, device=generator.device, dtype=wide)
        return low + (high - low) * x

    q, k = normal(), normal()
    if not case.l2norm:
        q, k = (normalize(x.to(wide), dim=-1).to(case.torch_dtype) for x in (q, k))
    leaves = {
        "q": q,
        "k": k,
        "v": normal(),
        "step": between(0, case.chunk_size**-0.5),
        "decay": between(0.9, 1),
        "window_gates": between(0, 2 / case.window, case.window),
    }
    if case.momentum:
        leaves["momentum"] = between(0.1, 0.7)
    return Inputs({name: x.requires_grad_() for name, x in leaves.items()}, normal())


def operands(case: OmegaCase, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """The tensors of a call: queries and keys of norm one."""
    if not case.l2norm:
        return leaves
    return leaves | {name: normalize(leaves[name], dim=-1) for name in ("q", "k")}


def rules(case: OmegaCase) -> dict[str, Any]:
    """What is not a tensor."""
    given: dict[str, Any] = {"window": case.window, "chunk_size": case.chunk_size}
    return given | ({"feature_map": "symmetric"} if case.symmetric else {})


def call(case: OmegaCase, inputs: Inputs, backend: str) -> Work:
    """`omega_memory` on a backend, without a note of what runs it."""
    options: dict[str, Any] = {**rules(case), "backend": backend}

    def forward() -> tuple[Tensor, ...]:
        return (omega_memory(**operands(case, inputs.leaves), **options)[0],)

    return Work(forward, inputs.leaves, (inputs.d_out,))


def contenders(case: OmegaCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        def build(case: OmegaCase, inputs: Inputs) -> Work:
            work = call(case, inputs, backend)
            options: dict[str, Any] = {**rules(case), "backend": backend}
            work.notes = explained(omega_memory, **operands(case, inputs.leaves), **options)
            return work

        mark = "" if backend == backends[0] else f" [{backend}]"
        # Plain torch's backward over symmetric features is for small calls; ours is not timed yet.
        modes = ("fwd",) if case.symmetric else MODES
        return Contender(
            f"{case.contenders[0]}{mark}", case, "omega", build, ours=True, modes=modes
        )

    return [builder(backend) for backend in backends]
