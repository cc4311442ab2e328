"""The Omega rule on the same tensors, and the Atlas memory in plain torch.

`chunked` is what one would hand to torch.compile: a chunk's momentum and what it writes wait for
the chunk before, so that chunks are a loop, while all reads are formed at once:

    R = K M − V      S ← B_b S − Kᵀ (U_b ∘ R)      M ← A_b M + output_step_b NS(S)      y = A q M

Products run in the dtype of k, those of Newton–Schulz in fp16 where k is bf16, all else in fp32
(float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ops import omega_memory
from ...ops.newton_schulz.coefficients import schedule
from ..cases import MODES
from ..family import Contender, Work
from .cases import NS_STEPS, AtlasCase, OmegaCounts
from .ours import Inputs, call, rules

NAMES = {
    "omega-momentum": "omega_memory on the same tensors: no Newton–Schulz",
    "eager": "the op's eager backend: chunk after chunk in torch",
    "compiled": "the same chunks in torch, under torch.compile",
}


def orthogonal(s: Tensor, compute: torch.dtype) -> Tensor:
    """Newton–Schulz of matrices (…, D, Dv), D ≥ Dv, of five steps."""
    norm = torch.linalg.vector_norm(s, dim=(-2, -1), keepdim=True)
    x = (s / (norm + 1e-7)).mT.to(compute)
    numbers = schedule("chunked", "muon", NS_STEPS)
    for a, b, c in zip(*(numbers[i::3] for i in range(3)), strict=True):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT.to(s.dtype)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, window_gates: Tensor,
    momentum: Tensor, output_step: Tensor, *, window: int, chunk_size: int, ns_stride: int,
) -> Tensor:  # fmt: skip
    """y of `atlas_memory`, (B, T, H, D), with a Newton–Schulz at the end of each whole chunk."""
    assert ns_stride == chunk_size
    tokens, dtype, acc = q.shape[1], k.dtype, step.dtype
    older, missing = window - 1, -q.shape[1] % chunk_size
    compute = torch.float16 if dtype == torch.bfloat16 else acc

    def blocks(x: Tensor, fill: float = 0.0) -> Tensor:
        """(B, T, H, ·) → (B, H, chunks, b, ·), `fill` behind the last token."""
        x = pad(x, (0, 0, 0, 0, 0, missing), value=fill)
        return x.transpose(1, 2).unflatten(2, (-1, chunk_size))

    def with_older(x: Tensor) -> Tensor:
        """Blocks of n = window − 1 + b rows."""
        x = blocks(x)
        before = pad(x[:, :, :-1, chunk_size - older :], (0, 0, 0, 0, 1, 0))
        return torch.cat((before, x), 3)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.to(dtype) @ right.to(dtype)).to(acc)

    q, k, v = blocks(q), with_older(k), with_older(v).to(acc)
    rate = blocks(decay[..., None], 1.0)[..., 0].cumprod(-1)
    theta = blocks(momentum[..., None], 1.0)[..., 0]
    drop = theta.flip(-1).cumprod(-1).flip(-1)  # of a token and those behind it
    left = torch.cat((drop[..., 1:], torch.ones_like(drop[..., :1])), -1)
    weights = left[..., None] * blocks(step[..., None] * window_gates)
    push = weights.new_zeros(*weights.shape[:3], chunk_size + older)
    for lag in range(window):
        push = push + pad(weights[..., lag], (older - lag, lag))
    state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=acc)
    velocity, states = state, [state]
    for n in range(k.shape[2]):
        error = product(k[:, :, n], state) - v[:, :, n]
        written = product(k[:, :, n].mT, push[:, :, n, :, None] * error)
        velocity = drop[:, :, n, :1, None] * velocity - written
        state = rate[:, :, n, -1:, None] * state
        if (n + 1) * chunk_size <= tokens:
            out = output_step[:, (n + 1) * chunk_size - 1, :, None, None]
            state = state + out * orthogonal(velocity, compute)
        states.append(state)
    before = torch.stack(states, 2)
    y = rate[..., None] * product(q, before[:, :, :-1])
    last = product(q[..., -1:, :], before[:, :, 1:])
    whole = tokens // chunk_size
    last = torch.cat((last[:, :, :whole], y[:, :, whole:, -1:]), 2)
    y = torch.cat((y[..., :-1, :], last), 3)
    return y.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(dtype)


def contenders(case: AtlasCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    return [_contender(name, case) for name in case.peers if name in names]


def _contender(name: str, case: AtlasCase) -> Contender:
    omega = name == "omega-momentum"
    counted = OmegaCounts(**vars(case)) if omega else case
    return Contender(name, counted, "omega" if omega else "atlas", _BUILD[name], modes=MODES)


def _omega(case: AtlasCase, inputs: Inputs) -> Work:
    leaves = {name: x for name, x in inputs.leaves.items() if name != "output_step"}
    given = {name: x for name, x in rules(case).items() if name != "ns_stride"}

    def forward() -> tuple[Tensor, ...]:
        return (omega_memory(**leaves, **given)[0],)

    return Work(forward, leaves, (inputs.d_out,))


def _eager(case: AtlasCase, inputs: Inputs) -> Work:
    return call(case, inputs, "eager")


def _compiled(case: AtlasCase, inputs: Inputs) -> Work:
    from torch._functorch import config

    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(chunked, dynamic=False, fullgraph=True)

    def forward() -> tuple[Tensor, ...]:
        return (compiled(**inputs.leaves, **rules(case)),)

    work = Work(forward, inputs.leaves, (inputs.d_out,))
    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        outputs = work.forward()
        if case.modes != ("fwd",):
            work.backward(outputs)
    return work


_BUILD: dict[str, Callable[[AtlasCase, Inputs], Work]] = {
    "omega-momentum": _omega,
    "eager": _eager,
    "compiled": _compiled,
}
