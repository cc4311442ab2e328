"""The gated delta rule in plain torch, all chunks at once, and that of flash-linear-attention.

`chunked` is what one would hand to torch.compile. A chunk maps the memory before it affinely,

    S ← (e_C I − Kᵀ (t ∘ W)) S + Kᵀ (t ∘ Y)

in the names of `ops.gated_delta.triton_kernels`, so that one small product a chunk is all that has
to wait for the chunk before.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ..cases import MODES
from ..family import Contender, Work
from .cases import DeltaCase
from .ours import Inputs, call

NAMES = {
    "fla": "chunk_gated_delta_rule of flash-linear-attention",
    "compiled": "all chunks in torch as one graph, under torch.compile",
    "eager": "the op's eager backend: chunk after chunk in torch",
}
CHUNK = 64
# flash-linear-attention #640: its gated backward refuses to run on Hopper with these Tritons.
_BROKEN = ((3, 4, 0), (3, 7, 1))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, l2norm: bool
) -> Tensor:
    """o of `gated_delta_rule`; products in the dtype of k, all else in fp32 (float64)."""
    tokens, heads, dtype, acc = q.shape[1], beta.shape[2], v.dtype, beta.dtype

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a.to(dtype) @ b.to(dtype)).to(acc)

    def cut(x: Tensor) -> Tensor:
        """(B, T, Hx, …) → (B, H, chunks, 64, …)."""
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, -tokens % CHUNK))
        x = x.repeat_interleave(heads // x.shape[2], 2).unflatten(1, (-1, CHUNK))
        return x.movedim(3, 1)

    if l2norm:
        q, k = (normalize(x.to(acc), dim=-1) for x in (q, k))
    q, k, v, log_decay, beta = (cut(x) for x in (q, k, v, log_decay, beta))
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = torch.where(below.tril(-1), log_decay[..., None], 0).cumsum(-2)
    table = torch.where(below, between.exp(), 0)  # E
    start, rate = log_decay.cumsum(-1).exp()[..., None], beta[..., None]
    triangle = (rate * table * product(k, k.mT)).tril(-1)
    right = torch.cat((rate * start * k, rate * v), -1)
    both = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    w, y = both.split((k.shape[-1], v.shape[-1]), -1)
    keys = (table[..., -1, :, None] * k).mT
    eye = torch.eye(k.shape[-1], dtype=acc, device=k.device)
    maps = start[..., -1:, :] * eye - product(keys, w)
    offsets = product(keys, y)
    states = [torch.zeros_like(offsets[:, :, 0].flatten(0, 1))]
    steps = zip(maps.flatten(0, 1).unbind(1), offsets.flatten(0, 1).unbind(1), strict=True)
    for matrix, offset in list(steps)[:-1]:
        states.append(torch.baddbmm(offset, matrix, states[-1]))
    state = torch.stack(states, 1).unflatten(0, q.shape[:2])
    read = start * product(q, state)
    o = read + product(table * product(q, k.mT), y - product(w, state))
    return o.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(dtype)


def available(name: str, case: DeltaCase) -> str | None:
    """Why the peer cannot run the case; None if it is worth trying."""
    if name != "fla":
        return None
    if case.device != "cuda":
        return "needs a GPU"
    if importlib.util.find_spec("fla") is None:
        return "fla is not installed"
    return "16-bit dtypes only" if case.dtype not in ("bf16", "fp16") else None


def contenders(case: DeltaCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""

    def built(name: str) -> Contender:
        modes = ("fwd",) if name == "fla" and _backward_refuses() else MODES
        return Contender(
            name, case, case.op, _BUILD[name], reason=available(name, case), modes=modes
        )

    return [built(name) for name in case.peers if name in names]


def _eager(case: DeltaCase, inputs: Inputs) -> Work:
    return call(case, inputs, "eager")


def _compiled(case: DeltaCase, inputs: Inputs) -> Work:
    from torch._functorch import config

    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(chunked, dynamic=False, fullgraph=True)

    def forward() -> tuple[Tensor, ...]:
        return (compiled(**inputs.leaves, l2norm=case.l2norm),)

    work = Work(forward, inputs.leaves, (inputs.d_out,))
    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        outputs = work.forward()
        if case.modes != ("fwd",):
            work.backward(outputs)
    return work


def _fla(case: DeltaCase, inputs: Inputs) -> Work:
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    given = tuple(inputs.leaves.values())

    def forward() -> tuple[Tensor, ...]:
        return (rule(*given, scale=1.0, use_qk_l2norm_in_kernel=case.l2norm)[0],)

    return Work(forward, inputs.leaves, (inputs.d_out,))


_BUILD: dict[str, Callable[[DeltaCase, Inputs], Work]] = {
    "eager": _eager,
    "compiled": _compiled,
    "fla": _fla,
}


def _backward_refuses() -> bool:
    """Whether fla's gated backward is known to raise on this GPU and Triton."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = str(importlib.import_module("triton").__version__).split("+")[0]
    here = tuple(int(part) for part in version.split(".")[:3])
    return _BROKEN[0] <= here < _BROKEN[1]
