"""What a call of the Atlas memory is compared with.

On small inputs all of it with the literal loops of `fastweights.reference`, in float64 and in the
case's dtype. On the tensors that are timed the truth is the eager backend in float64, which the
tests hold to the loops, and the yardstick the eager backend in the case's dtype, on some heads of
the last row: the largest offsets. Heads do not meet, so that all tokens and all gradients of these
are compared. The Omega rule, a peer, is held to its own loops and backend in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ... import reference
from ...ops import atlas_memory, omega_memory
from ..family import Results
from ..omega.gate import HEADS, Named, _differentiated, _wide
from .cases import AtlasCase
from .ours import Inputs, rules


def everything(function: str, case: AtlasCase, inputs: Inputs, got: Named) -> Results:
    """Everything that is returned and every gradient."""
    call = _literal(function, case)
    leaves = _own(function, inputs.leaves)
    truth = _differentiated(call, _wide(leaves), inputs.d_out)
    plain = _differentiated(call, leaves, inputs.d_out)
    return Results(got, {name: truth[name] for name in got}, plain)


def sample(function: str, case: AtlasCase, inputs: Inputs, got: Named) -> Results:
    """The last heads of the last row.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")

    def cut(x: Tensor) -> Tensor:
        return x[-1:, :, -HEADS:]

    leaves = {name: cut(x.detach()) for name, x in _own(function, inputs.leaves).items()}
    call = _eager(function, case)
    truth = _differentiated(call, _wide(leaves), cut(inputs.d_out))
    plain = _differentiated(call, leaves, cut(inputs.d_out))
    mine = {name: cut(x) for name, x in got.items()}
    return Results(mine, {name: truth[name] for name in mine}, plain)


def _own(function: str, leaves: Named) -> Named:
    return {n: x for n, x in leaves.items() if function == "atlas" or n != "output_step"}


def _rules(function: str, case: AtlasCase) -> dict[str, object]:
    return {n: x for n, x in rules(case).items() if function == "atlas" or n != "ns_stride"}


def _literal(function: str, case: AtlasCase) -> Callable[[Named], Tensor]:
    literal = reference.atlas_memory if function == "atlas" else reference.omega_memory
    return lambda given: literal(**given, **_rules(function, case))[0]


def _eager(function: str, case: AtlasCase) -> Callable[[Named], Tensor]:
    op = atlas_memory if function == "atlas" else omega_memory
    return lambda given: op(**given, **_rules(function, case), backend="eager")[0]
