r"""Steps of the Omega rule that keep a memory bounded, whatever the text.

All errors of a chunk are taken at one memory, so that its tokens make one large step together.
Without decay it shrinks errors while the largest eigenvalue of Σ_t step_t φ(k_t)ᵀ φ(k_t) stays
below 2, and a run of equal tokens adds all of its steps up in one direction. The normalised rule
divides each step by how much the chunk has already written along its key,

    n_t = Σ_i κ(k_t, k_i)²    over the tokens i ≤ t of t's chunk, κ(a, b) = φ(a)·φ(b)
    step_t = eta_max · gate_t / max(n_t, 1)

so that m equal tokens step by 1 + ½ + … + 1/m of eta_max. The rule looks at no token after t, and
chunks restart with every packed sequence as those of `omega_memory` do. Keys of norm one have
n_t ≥ 1; below, where κ(k_t, k_t) < 1, dividing would make small features step the further. The
fixed rule is eta_max · gate_t with an eta_max that holds for any keys with κ(k, k) ≤ 1.

Plain torch in fp32 (float64 for float64), differentiable more than once.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .. import checks
from ..dispatch import without_autocast
from .op import OmegaTensors, omega_shape

RULES = ("normalised", "fixed")


def omega_step_size(
    k: torch.Tensor,
    gate: torch.Tensor,
    *,
    chunk_size: int,
    step_rule: str = "normalised",
    eta_max: float | None = None,
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `step` of `omega_memory` from keys and a gate in [0, 1].

    With window gates that sum up to 1, as gates divided by the window do.

    Args:
        k: (B, T, H, d), bf16, fp16, fp32 or float64: the keys that `omega_memory` gets, norm one.
        gate: (B, T, H), fp32 (float64 for float64), a sigmoid; one that starts at ½ starts at half
            of eta_max.
        chunk_size: of the `omega_memory` call.
        step_rule: "normalised" or "fixed".
        eta_max: what a gate of 1 is worth to the first token of a chunk. None:
            min(1, 1.6/√chunk_size), by the fixed rule 1.9/chunk_size.
        feature_map, coefficients: of the `omega_memory` call.
        cu_seqlens: int32 (N+1,), of packed sequences.

    Returns:
        (B, T, H), dtype as gate.

    Raises:
        TypeError: wrong dtype, a gate in half precision, chunk_size not an int.
        ValueError: wrong shape, an unknown rule, eta_max not above 0.

    Example:
        >>> import torch
        >>> from fastweights.ops import omega_memory, omega_step_size
        >>> k = torch.nn.functional.normalize(torch.randn(1, 1, 2, 16), dim=-1).expand(1, 96, 2, 16)
        >>> step = omega_step_size(k, torch.ones(1, 96, 2), chunk_size=64)
        >>> step[0, [0, 1, 63, 64], 0]  # the same token again and again, two chunks of it
        tensor([0.2000, 0.1000, 0.0031, 0.2000])
        >>> y, _ = omega_memory(k, k, k, step=step, window=4, chunk_size=64)
    """
    op = "omega_step_size"
    checks.tensor(op, "k", k, "B T H d", checks.FLOATING)
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    checks.tensor(op, "gate", gate, "B T H", (acc,))
    checks.same_device(op, "gate", gate, k.device)
    for dim, of in enumerate(("batch", "tokens", "heads")):
        checks.size(op, "gate", gate, dim, k.shape[dim], f"the {of} of k")
    checks.choice(op, "step_rule", step_rule, RULES)
    if eta_max is not None:
        checks.above_zero(op, "eta_max", eta_max)
    if isinstance(coefficients, torch.Tensor) and coefficients.ndim == 2:
        checks.size(op, "coefficients", coefficients, 0, k.shape[2], "the heads of k")
    absent = dict.fromkeys(OmegaTensors._fields)
    given = OmegaTensors._make(
        (absent | {"q": k, "k": k, "v": k, "step": gate, "coefficients": coefficients,
                   "cu_seqlens": cu_seqlens}).values()
    )  # fmt: skip
    shape = omega_shape(
        op, given, window=1, chunk_size=chunk_size, inner_loss="squared",
        feature_map=feature_map, read_before=False,
    )  # fmt: skip
    if step_rule == "fixed":
        return gate * (1.9 / chunk_size if eta_max is None else eta_max)

    from .eager import features

    with without_autocast(k.device):
        x = features(shape, k.transpose(1, 2), coefficients).to(acc)  # (B, H, T, D)
        written = _written(x, chunk_size, cu_seqlens).transpose(1, 2)
    most = min(1.0, 1.6 / chunk_size**0.5) if eta_max is None else eta_max
    return most * gate / written.clamp(min=1)


def _written(x: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """n (B, H, T) of features x (B, H, T, D).

    Tokens are cut into blocks as long as a chunk. Where packed sequences begin anywhere, a token's
    chunk may begin in the block before.
    """
    tokens = x.shape[2]
    size = max(min(chunk_size, tokens), 1)
    blocks = pad(x, (0, 0, 0, -tokens % size)).unflatten(2, (-1, size))  # (B, H, C, size, D)
    if cu_seqlens is None:
        squares = (blocks @ blocks.mT).square().tril()
    else:
        before = torch.cat((torch.zeros_like(blocks[:, :, :1]), blocks[:, :, :-1]), 2)
        t = torch.arange(blocks.shape[2] * size, device=x.device)
        # Padding behind the last sequence counts as one more.
        sequence = torch.searchsorted(cu_seqlens[1:].long(), t, right=True)
        begin = cu_seqlens.long()[sequence]
        first = (t - (t - begin) % chunk_size).unflatten(0, (-1, size))[..., None]
        t = t.unflatten(0, (-1, size))
        i = torch.cat((t - size, t), 1)[:, None]  # (C, 1, 2 · size)
        seen = (first <= i) & (i <= t[..., None])
        squares = (blocks @ torch.cat((before, blocks), 3).mT).square() * seen
    return squares.sum(-1).flatten(2)[..., :tokens]
