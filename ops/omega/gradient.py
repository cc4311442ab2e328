r"""One chunk of the Omega rule, taken apart for an optimiser of the caller's own.

Of a chunk of b tokens with the n keys that they write, h = n − b of them older than the chunk, and
with x = φ(k) and the memory M at the end of the chunk before,

    R = x M − v ("dot": −v)
    A_t = decay_t A_{t−1}      B_t = momentum_t B_{t−1}      a_t = decay_t a_{t−1} + B_t
    U_t = momentum_t U_{t−1} + W_t                           P_t = decay_t P_{t−1} + U_t
    G   = xᵀ (u ∘ R)

W_t holds step_t · window_gates_t at the keys of token t's window; A_0 = B_0 = 1, the others are 0.
u is U_b, what S has gathered by the end of the chunk, and without momentum Σ_t W_t. Descent as
`omega_memory` does it is

    y_t = A_t φ(q_t) M + a_t φ(q_t) S − (P_t ∘ φ(q_t) xᵀ) R
    M ← A_b M + a_b S − xᵀ (P_b ∘ R)                         S ← B_b S − G

Plain torch in fp32 (float64 for float64): there is no loop that a graph would unroll and nothing to
stream, so autograd's own backward is right for it, and its second derivative too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .. import checks
from ..dispatch import autocast_operands, requested, without_autocast
from .op import OmegaShape, OmegaTensors, omega_shape


class OmegaGradient(NamedTuple):
    """One chunk of b tokens with h older keys and values in front of them, n = h + b.

    Attributes:
        residual: R, (B, n, H, Dv).
        write: P, (B, H, b, n): what of each error a token's read sees.
        momentum_write: U, (B, H, b, n), what of each error is in S; None without momentum.
        decay: A, (B, b, H), what is left of M.
        carry: a, (B, b, H), what of S has gone into M; None without momentum.
        momentum_decay: B, (B, b, H), what is left of S; None without momentum.
        gradient: G, (B, H, D, Dv), of the weighted inner loss at M. Descent subtracts it.
    """

    residual: torch.Tensor
    write: torch.Tensor
    momentum_write: torch.Tensor | None
    decay: torch.Tensor
    carry: torch.Tensor | None
    momentum_decay: torch.Tensor | None
    gradient: torch.Tensor


def omega_gradient(
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    *,
    step: torch.Tensor,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    decay: torch.Tensor | None = None,
    momentum: torch.Tensor | None = None,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    backend: str = "auto",
) -> OmegaGradient:
    """Errors of one chunk at the memory before it, their weights token by token, and the gradient.

    Args:
        k: (B, n, H, d), bf16, fp16, fp32 or float64, any strides: the keys of h ≤ window − 1 tokens
            before the chunk, then those of its b tokens.
        v: (B, n, H, Dv) of k's dtype.
        state: M, (B, H, D, Dv), fp32 (float64 for float64); may be an expanded parameter.
        step: (B, b, H), b ≥ 1; gates are fp32 (float64 for float64), also under autocast.
        window_gates: (B, b, H, window), last axis the lag; None: 1/window each.
        window: tokens that a write looks at, its own among them.
        decay, momentum: (B, b, H); None: 1, and no S.
        inner_loss, feature_map, coefficients: as of `omega_memory`.
        backend: "auto" or "eager".

    Returns:
        `OmegaGradient`, all fp32 (float64 for float64).

    Differentiable in all floating arguments, more than once.

    Raises:
        TypeError: wrong dtype, gates in half precision, not a plain tensor, window not an int.
        ValueError: wrong shape, more older rows than a window reaches, another backend.

    Example:
        >>> import torch
        >>> from fastweights.ops import newton_schulz, omega_gradient
        >>> k = torch.nn.functional.normalize(torch.randn(1, 18, 2, 8), dim=-1)  # 2 older, 16 new
        >>> v, memory = torch.randn(1, 18, 2, 4), torch.zeros(1, 2, 8, 4)
        >>> chunk = omega_gradient(k, v, memory, step=torch.full((1, 16, 2), 0.1), window=3)
        >>> memory = memory - 0.1 * newton_schulz(chunk.gradient)  # Muon in the place of descent
        >>> chunk.residual.shape, chunk.write.shape, chunk.gradient.shape
        (torch.Size([1, 18, 2, 4]), torch.Size([1, 2, 16, 18]), torch.Size([1, 2, 8, 4]))
    """
    op = "omega_gradient"
    if requested(op, backend) not in ("auto", "eager"):
        raise ValueError(f"{op}: backend={backend!r}: this op has no such implementation")
    for name, x, layout in (("k", k, "B n H d"), ("v", v, "B n H Dv")):
        checks.tensor(op, name, x, layout, checks.FLOATING)
    k, v = autocast_operands(k, v)
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    _check_gates(
        op, k, acc,
        {"step": step, "decay": decay, "momentum": momentum, "window_gates": window_gates},
    )  # fmt: skip
    older = _check_rows(op, k, v, step.shape[1], window)
    if isinstance(coefficients, torch.Tensor) and coefficients.ndim == 2:
        checks.size(op, "coefficients", coefficients, 0, k.shape[2], "the heads of k")

    # The older rows stand at the end of a tail of full length, as a call of the memory has them.
    missing = window - 1 - older
    length = torch.full((k.shape[0],), older, dtype=torch.int32, device=k.device)
    tail_k, tail_v = (pad(x[:, :older], (0, 0, 0, 0, missing, 0)) for x in (k, v))
    given = OmegaTensors(
        k[:, older:], k[:, older:], v[:, older:], step, decay, window_gates, momentum,
        coefficients, None, None, tail_k, tail_v, length, None,
    )  # fmt: skip
    shape = omega_shape(
        op, given, window=window, chunk_size=step.shape[1], inner_loss=inner_loss,
        feature_map=feature_map, read_before=False,
    )  # fmt: skip
    _check_state(op, state, shape)
    with without_autocast(k.device):
        return _chunk(shape, given, state, missing)


def _check_gates(
    op: str, k: torch.Tensor, acc: torch.dtype, gates: dict[str, torch.Tensor | None]
) -> None:
    """All gates have the tokens of `step`; how many those are is not checked here."""
    step = gates["step"]
    for name, x in gates.items():
        if x is None and name != "step":
            continue
        checks.tensor(op, name, x, "B b H window" if name == "window_gates" else "B b H", (acc,))
        assert x is not None
        assert step is not None
        checks.same_device(op, name, x, k.device)
        checks.size(op, name, x, 0, k.shape[0], "the batch of k")
        checks.size(op, name, x, 1, step.shape[1], "the tokens of step")
        checks.size(op, name, x, 2, k.shape[2], "the heads of k")


def _check_rows(op: str, k: torch.Tensor, v: torch.Tensor, tokens: int, window: int) -> int:
    """How many rows of k and v are older than the chunk."""
    checks.same_dtype(op, "v", v, k.dtype, "k")
    checks.same_device(op, "v", v, k.device)
    for dim, of in enumerate(("batch", "rows", "heads")):
        checks.size(op, "v", v, dim, k.shape[dim], f"the {of} of k")
    if not isinstance(window, int):
        raise TypeError(f"{op}: window must be an int, got {type(window).__name__}")
    checks.positive(op, "window", window)
    if tokens < 1:
        raise ValueError(f"{op}: step must hold at least one token, got shape (B, 0, H)")
    older = k.shape[1] - tokens
    if not 0 <= older < window:
        raise ValueError(
            f"{op}: k has {k.shape[1]} rows for the {tokens} tokens of step; a window of {window} "
            f"takes {tokens} to {tokens + window - 1}"
        )
    return older


def _check_state(op: str, state: torch.Tensor, shape: OmegaShape) -> None:
    checks.tensor(op, "state", state, "B H D Dv", (shape.acc,))
    checks.same_device(op, "state", state, shape.device)
    checks.size(op, "state", state, 0, shape.batch, "the batch of k")
    checks.size(op, "state", state, 1, shape.heads, "the heads of k")
    checks.size(op, "state", state, 2, shape.wide, "the width of the features of k")
    checks.size(op, "state", state, 3, shape.values, "the width of v")


def _chunk(
    shape: OmegaShape, given: OmegaTensors, state: torch.Tensor, missing: int
) -> OmegaGradient:
    """`missing`: rows of the tail that the caller did not have."""
    from .eager import Run, pieces

    (piece,) = pieces(shape, given)
    at = Run(shape, piece)
    (chunk,) = at.chunks
    x, value = (rows[:, :, missing:].to(shape.acc) for rows in (at.k, at.v))
    residual = -value if shape.dot else x @ state - value  # (B, H, n, Dv)
    scans = at._scans(chunk)
    write, push = (rows[..., missing:] for rows in (scans.write, scans.push))
    total = push[:, :, -1] if shape.momentum else push.sum(2)
    return OmegaGradient(
        residual=residual.transpose(1, 2),
        write=write,
        momentum_write=push if shape.momentum else None,
        decay=scans.rate.transpose(1, 2),
        carry=None if scans.carry is None else scans.carry.transpose(1, 2),
        momentum_decay=None if scans.drop is None else scans.drop.transpose(1, 2),
        gradient=x.mT @ (total[..., None] * residual),
    )
