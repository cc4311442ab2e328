"""Coefficients of the polynomial step, by name, and how a call's steps are made of them.

A step maps each singular value x of the iterate to a·x + b·x³ + c·x⁵. A set is a sequence of such
triples, one a step; where a call has more steps than its set has triples, the last one repeats.

| name                 | triples | a singular value of 0.01 to 1 lands, after five steps, in |
|----------------------|---------|-----------------------------------------------------------|
| "muon"               | 1       | [0.682, 1.134]                                            |
| "modded_nanogpt"     | 5       | [0.978, 1.032]                                            |
| "polar_express"      | 5       | [0.870, 1.124]                                            |
| "polar_express_1.05" | 5       | [0.846, 1.124]                                            |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import inf

import torch

Triple = tuple[float, float, float]

# K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024): the steepest slope at
# zero, and no convergence to 1.
_MUON: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),)

# The modded-nanogpt speed run: one triple a step, found together for five steps.
_MODDED_NANOGPT: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# "The Polar Express" (arXiv 2505.16932), first five steps, before the safety scale.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def _scaled(triples: tuple[Triple, ...], safety: float) -> tuple[Triple, ...]:
    """p(x / safety) for each p: rounding may push a singular value above 1 without divergence."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in triples)


SETS: dict[str, tuple[Triple, ...]] = {
    "muon": _MUON,
    "modded_nanogpt": _MODDED_NANOGPT,
    "polar_express": _scaled(_POLAR_EXPRESS, 1.01),  # the paper's safety scale
    "polar_express_1.05": _scaled(_POLAR_EXPRESS, 1.05),  # the gram-newton-schulz package's
}


def schedule(
    op: str, coefficients: str | Sequence[Sequence[float]], steps: int, prefix: str = ""
) -> tuple[float, ...]:
    """The 3·steps numbers a₁, b₁, c₁, a₂, … of a call; `prefix`: of its arguments' names.

    Raises:
        ValueError: an unknown name, what is no sequence of triples of finite numbers, or more
            triples than steps: a schedule cut short is another polynomial than was asked for.
    """
    name = f"{prefix}coefficients"
    if isinstance(coefficients, str):
        if coefficients not in SETS:
            raise ValueError(
                f"{op}: {name} must be one of {', '.join(SETS)} or a sequence of triples, "
                f"got {coefficients!r}"
            )
        triples: Sequence[Sequence[float]] = SETS[coefficients]
    else:
        triples = coefficients
    if not isinstance(triples, (list, tuple)) or not triples or not all(map(_is_triple, triples)):
        raise ValueError(
            f"{op}: {name} must be a name or a sequence of triples of finite numbers, "
            f"[(a, b, c), ...], got {coefficients!r}"
        )
    if len(triples) > steps:
        raise ValueError(
            f"{op}: {name} holds {len(triples)} triples, {prefix}steps is {steps}; "
            "at most one triple a step"
        )
    last = len(triples) - 1
    return tuple(float(number) for j in range(steps) for number in triples[min(j, last)])


def _is_triple(x: object) -> bool:
    if not isinstance(x, (list, tuple)) or len(x) != 3:
        return False
    return all(isinstance(number, (int, float)) and -inf < number < inf for number in x)


@functools.lru_cache(maxsize=256)
def on_device(coefficients: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The coefficients and a 0 on the device: in an argument, no schedule is another kernel.

    Raises:
        RuntimeError: a first use while the stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "fastweights: Newton–Schulz has not met these coefficients: call it once before capture"
        )
    return torch.tensor((*coefficients, 0.0), dtype=torch.float32, device=device)
