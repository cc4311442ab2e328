"""Muon: momentum whose direction is orthogonalised before it is added to a matrix of weights.

    B ← momentum·B + (1 − momentum)·g
    U = momentum·B + (1 − momentum)·g     (nesterov; else U = B)
    p ← (1 − lr·weight_decay)·p − lr·r·newton_schulz(U)

r evens out rectangular shapes: √max(1, rows / cols) with "original", and with "match_rms_adamw"
0.2·√max(rows, cols), which gives the update the size that AdamW's usually has.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); "match_rms_adamw" is
from "Muon is scalable for LLM training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..ops import checks, explain, newton_schulz

ADJUST = ("original", "match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model; embeddings, biases and norms belong to another optimiser.

    Parameters of one group with equal shape, dtype and device are orthogonalised as one stack, in
    one call of `newton_schulz`. The gradient of a DTensor is gathered, every rank orthogonalises
    the whole matrix, and keeps its part of the update; the momentum stays sharded.

    Args:
        params: 2-D parameters, or groups of them; each option below can differ by group.
        lr: learning rate.
        weight_decay: decoupled, as AdamW's.
        momentum: in [0, 1).
        nesterov: look one step of momentum ahead.
        ns_coefficients, ns_steps, eps: `coefficients`, `steps` and `eps` of `newton_schulz`.
        adjust_lr_fn: "original" or "match_rms_adamw", see above; None is "original".
        compute_dtype: of the iterates; None is what `newton_schulz` takes for the parameter's
            dtype. float64 parameters are orthogonalised in float64 whatever it says.
        backend: of `newton_schulz`.

    Raises:
        ValueError: a parameter that is not 2-D (the error says which) or an option out of range.
        TypeError: a parameter or an option of a wrong type.

    Example:
        >>> import torch
        >>> from fastweights.graphs import Muon
        >>> layer = torch.nn.Linear(16, 32, bias=False)
        >>> optimiser = Muon(layer.parameters(), lr=0.02, weight_decay=0.0)
        >>> before = layer.weight.detach().clone()
        >>> layer(torch.randn(64, 16)).square().mean().backward()
        >>> optimiser.step()
        >>> step = (layer.weight.detach() - before) / 0.02 / 2**0.5
        >>> bool((torch.linalg.svdvals(step) - 1).abs().max() < 0.4)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[Sequence[float]] = "muon",
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        compute_dtype: torch.dtype | None = torch.float16,
        backend: str = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "compute_dtype": compute_dtype,
            "backend": backend,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of 2-D parameters; a group that is refused leaves the optimiser as it was."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1], len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
            for params in alike.values():
                updates = [_gathered(self._direction(p, group)) for p in params]
                stack = torch.stack(updates) if len(updates) > 1 else updates[0][None]
                stack = newton_schulz(stack, **_options(params[0].dtype, group))
                for p, update in zip(params, stack, strict=True):
                    _apply(p, update, group)
        return loss

    def _direction(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """U, after the momentum took the gradient in."""
        assert p.grad is not None
        state, momentum = self.state[p], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum) if group["nesterov"] else buffer


def _options(dtype: torch.dtype, group: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `newton_schulz`."""
    return {
        "steps": group["ns_steps"],
        "coefficients": group["ns_coefficients"],
        "eps": group["eps"],
        "compute_dtype": None if dtype == torch.float64 else group["compute_dtype"],
        "backend": group["backend"],
    }


def _apply(p: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
    lr, (rows, cols) = float(group["lr"]), p.shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * sqrt(max(rows, cols))
    else:
        ratio = sqrt(max(1, rows / cols))
    p.mul_(1 - lr * group["weight_decay"])
    p.add_(_placed(update, p), alpha=-lr * ratio)


def _is_dtensor(x: torch.Tensor) -> bool:
    # By name, as `checks.tensor` does: the class is not imported where no mesh is in use.
    return type(x).__name__ == "DTensor"


# What follows takes a tensor or a DTensor, whose class is not imported; hence Any.


def _gathered(x: Any) -> torch.Tensor:
    return x.full_tensor() if _is_dtensor(x) else x


def _placed(whole: torch.Tensor, p: Any) -> torch.Tensor:
    """A matrix that every rank holds, sharded as `p` is: each rank keeps its part."""
    if not _is_dtensor(p):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = p.device_mesh, p.placements
    everywhere = [Replicate()] * mesh.ndim
    return DTensor.from_local(whole, mesh, everywhere, run_check=False).redistribute(
        mesh, placements
    )


def _check(group: dict[str, Any], index: int) -> None:
    """Refuse parameters and options that no step could use."""
    names = group.get("param_names") or [
        f"{i} of group {index}" for i in range(len(group["params"]))
    ]
    for name, p in zip(names, group["params"], strict=True):
        if p.dtype not in checks.FLOATING:
            raise TypeError(f"Muon: parameter {name} has dtype {p.dtype}")
        if p.ndim != 2:
            raise ValueError(
                f"Muon: parameter {name} has shape {tuple(p.shape)}; only 2-D parameters can be "
                "orthogonalised, another optimiser has to take the others"
            )
    for option in ("lr", "weight_decay"):
        if not group[option] >= 0:
            raise ValueError(f"Muon: {option} must be at least 0, got {group[option]}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"Muon: momentum must be in [0, 1), got {group['momentum']}")
    if group["adjust_lr_fn"] is not None:
        checks.choice("Muon", "adjust_lr_fn", group["adjust_lr_fn"], ADJUST)
    for dtype in {p.dtype for p in group["params"]}:
        # The op's own checks, on a matrix of no memory.
        matrix = torch.empty(1, 1, dtype=dtype, device="meta")
        explain(newton_schulz, matrix, **_options(dtype, group))
