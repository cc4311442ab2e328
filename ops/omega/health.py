r"""What tells a healthy Omega memory from one that forgets at once or is about to diverge.

    half-life     log ½ / log decay: tokens after which half of a write is left
    λ             the largest eigenvalue of N = φ(K)ᵀ diag(P_b) φ(K), of each chunk
    ‖M‖           the Frobenius norm of the state

A chunk of b tokens leaves (A_b I − N) M of the memory before it, with the A_b and P_b of
`omega_gradient`: that shrinks in every direction while λ < 1 + A_b, without decay λ < 2.

λ is ‖N³²‖_F^(1/32), by five squarings: never too small, with r rows at most r^(1/64) times too
large, 7 % for 64, and without a start that could miss a direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch

from .. import checks
from ..dispatch import without_autocast
from .op import OmegaShape, OmegaTensors, omega_shape

SQUARINGS = 5


class OmegaHealth(NamedTuple):
    """Figures of each head over all sequences of a call; detached.

    Attributes:
        half_life: in tokens, (quantiles, H); infinite where nothing decays.
        lambda_max: the largest λ of any chunk, (H,).
        state_norm: the largest ‖M‖ of any sequence, (H,).
    """

    half_life: torch.Tensor
    lambda_max: torch.Tensor
    state_norm: torch.Tensor


@torch.no_grad()
def omega_health(
    k: torch.Tensor,
    state: torch.Tensor,
    *,
    step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    momentum: torch.Tensor | None = None,
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    chunk_size: int = 64,
    cu_seqlens: torch.Tensor | None = None,
    quantiles: Sequence[float] = (0.1, 0.5, 0.9),
) -> OmegaHealth:
    """Figures for a log, of a call of `omega_memory` with the inner loss "squared".

    Goes through the chunks one by one and reads `cu_seqlens` on the host: meant for every so many
    steps of training, not for each.

    Args:
        k: (B, T, H, d) with B · T ≥ 1, and the other arguments as of that call.
        state: M, (N, H, D, Dv), as it left it.
        quantiles: of the half-life over tokens, the nearest token's.

    Raises:
        TypeError, ValueError: what `omega_memory` raises; no token; a quantile outside [0, 1].

    Example:
        >>> import torch
        >>> from fastweights.ops import omega_health
        >>> k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 8), dim=-1).expand(1, 64, 1, 8)
        >>> gates = {"step": torch.full((1, 64, 1), 0.1), "decay": torch.full((1, 64, 1), 0.98)}
        >>> health = omega_health(k, torch.zeros(1, 1, 8, 4), **gates)
        >>> health.half_life[1].round(), health.lambda_max.round(decimals=1)  # one token 64 times
        (tensor([34.]), tensor([3.6000]))
    """
    op = "omega_health"
    checks.tensor(op, "k", k, "B T H d", checks.FLOATING)
    checks.tensor(op, "state", state, "N H D Dv", checks.FLOATING)
    if k.shape[0] * k.shape[1] == 0:
        raise ValueError(f"{op}: k must hold at least one token, got shape {tuple(k.shape)}")
    for share in quantiles:
        if not 0 <= share <= 1:
            raise ValueError(f"{op}: quantiles must lie in [0, 1], got {share}")
    nothing = k.new_zeros(*k.shape[:3], state.shape[3])
    absent = dict.fromkeys(OmegaTensors._fields)
    given = OmegaTensors._make(
        (absent | {"q": k, "k": k, "v": nothing, "step": step, "decay": decay,
                   "window_gates": window_gates, "momentum": momentum,
                   "coefficients": coefficients, "cu_seqlens": cu_seqlens}).values()
    )  # fmt: skip
    shape = omega_shape(
        op, given, window=window, chunk_size=chunk_size, inner_loss="squared",
        feature_map=feature_map, read_before=False,
    )  # fmt: skip
    checks.tensor(op, "state", state, "N H D Dv", (shape.acc,))
    for dim, size in enumerate((shape.batch, shape.heads, shape.wide)):
        checks.size(op, "state", state, dim, size, f"dimension {dim} of N H D Dv")
    with without_autocast(k.device):
        return OmegaHealth(
            _half_life(given, quantiles),
            _lambda_max(shape, given),
            torch.linalg.vector_norm(state, dim=(2, 3)).amax(0),
        )


def _half_life(given: OmegaTensors, quantiles: Sequence[float]) -> torch.Tensor:
    """(quantiles, H): a quantile of the decays gives that of the half-lives, which grow with it."""
    decay = torch.ones_like(given.step) if given.decay is None else given.decay
    tokens = torch.tensor(decay.shape[1], device=decay.device)
    if given.cu_seqlens is not None:
        tokens = given.cu_seqlens[-1].long()
        padding = torch.arange(decay.shape[1], device=decay.device) >= tokens
        decay = decay.masked_fill(padding[:, None], torch.nan)  # sorted behind all numbers
    ordered = decay.flatten(0, 1).sort(0).values
    last = tokens * decay.shape[0] - 1
    at = (torch.tensor(quantiles, dtype=torch.float64, device=decay.device) * last).round().long()
    return log(2) / ordered[at.clamp(min=0)].log().abs()


def _lambda_max(shape: OmegaShape, given: OmegaTensors) -> torch.Tensor:
    from .eager import Run, pieces

    largest = given.step.new_zeros(shape.heads)
    for piece in pieces(shape, given):
        at = Run(shape, piece)
        for chunk in at.chunks:
            x = at.k[:, :, chunk.begin : chunk.end + at.older].to(shape.acc)
            weight = at._scans(chunk).write[:, :, -1].abs().sqrt()  # (B, H, n)
            largest = torch.maximum(largest, _spectral_radius(weight[..., None] * x).amax(0))
    return largest


def _spectral_radius(x: torch.Tensor) -> torch.Tensor:
    """Of xᵀ x, x (B, H, n, D), or of x xᵀ where that is smaller."""
    power = x @ x.mT if x.shape[2] < x.shape[3] else x.mT @ x
    norm = torch.linalg.matrix_norm(power, keepdim=True)
    found = norm.log()
    for i in range(1, SQUARINGS + 1):
        power = power / norm.clamp(min=torch.finfo(x.dtype).tiny)
        power = power @ power
        norm = torch.linalg.matrix_norm(power, keepdim=True)
        found = found + norm.log() / 2**i
    return found.exp()[..., 0, 0]
