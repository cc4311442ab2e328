"""Tokens one after another by Triton under the interpreter, against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.ops import alloc
from helpers import contracts, inputs, oracle
from helpers.delta_rewrite import MEMORY, WRITTEN, Case

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled kernels run instead, see test_delta_rewrite_gpu"
)

CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
OP = partial(ops.delta_rewrite, backend="triton")
IN_PLACE = partial(ops.delta_rewrite_, backend="triton")
BASE = Case(batch=2, heads=1, tokens=5, reads=4, first=True, values=20, mode="sequential")
CASES = [
    (BASE.but(first=False), FP16),
    (BASE.but(channels=True, heads=2, gamma_grad="full"), FP32),
    (BASE.but(normalize=False, gamma_grad="full"), FP32),
    (BASE.but(denominator=False, order=2), FP16),
    (BASE.but(correction=False, order=4, width=3), FP32),
    (BASE.but(tokens=17, reads=None, values=1, width=9, batch=1, first=False), FP32),
    (BASE.but(reads=0, width=2, values=33, first=False), FP32),
]


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in CASES]
)
def test_rules_and_sizes(case: Case, dtype: torch.dtype) -> None:
    """Results and gradients, into poisoned memory, of views with NaN around them."""
    oracle.check_op(
        OP, reference.delta_rewrite, case.arguments, dtype, CPU, seeds=(0,),
        label=case.name,
    )  # fmt: skip


@pytest.mark.parametrize("slots", [[-1, -1, -1], [4, -1, 0]], ids=str)
def test_in_place_is_the_functional_call(slots: list[int]) -> None:
    """Bits of rows and slots, those that nobody names; NaN in skipped rows."""
    given: dict[str, Any] = BASE.but(batch=3, first=False, channels=True).arguments(0, FP32, CPU)
    del given["gamma_grad"]
    pools = {}
    for name in MEMORY:
        x = given.pop(name)
        pools[name] = torch.rand(6, *x.shape[1:], generator=inputs.generator(1, CPU))
    rows, live = torch.tensor(slots), torch.tensor(slots) >= 0
    first = torch.tensor([False, True, True])
    for name in (*WRITTEN, "q"):
        given[name][~live] = torch.nan
    written = {f"{name}_pool": inputs.spaced(x) for name, x in pools.items()}
    with alloc.poison():
        y = IN_PLACE(**given, **written, slots=rows, first=first)
        kept = {n: x[live] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        held = {n: x[rows[live]] for n, x in pools.items()}
        wanted = OP(**kept, **held, first=first[live])
    assert not y[~live].any()
    assert torch.equal(y[live], wanted[0])
    for name, after in zip(MEMORY, wanted[1:], strict=True):
        pools[name][rows[live]] = after
        assert torch.equal(written[f"{name}_pool"], pools[name])


def test_an_echo_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As "auto" runs it on a GPU: what is taken off is what was added."""
    monkeypatch.setattr(
        "fastweights.ops.dispatch._auto_order", lambda arch: ("cuda", "triton", "eager")
    )
    given = Case(batch=2, values=20, mode="sequential").arguments(0, FP16, CPU)
    assert ops.explain(ops.delta_rewrite, **given).backend == "triton"
    echo = torch.zeros(given["state"].shape, requires_grad=True)
    _, state, _, after = ops.delta_rewrite(**contracts.leaves(given), echo=echo)
    (after * state.detach()).sum().backward()
    assert echo.grad is not None
    assert (echo.grad - given["state"]).abs().max() <= 1e-6 * state.abs().max()


def test_an_echo_gives_the_same_gradients_again() -> None:
    """As a call without one, and each time the same bits."""
    given = BASE.but(first=False).arguments(0, FP32, CPU)
    found = []
    for echo in (True, False, False):
        leaves = contracts.leaves(given)
        held = torch.zeros((), requires_grad=True).expand(given["state"].shape)
        y, state, z, *after = OP(**leaves, **({"echo": held} if echo else {}))
        loss = y.square().sum() + state.sin().sum() + z.square().sum()
        if echo:
            loss = loss + (after[0] * state.detach()).sum()
        loss.backward()
        found.append({n: leaves[n].grad for n in (*WRITTEN, *MEMORY, "q")})
    oracle.assert_bit_equal(found[2], found[1], "again")
    for name, x in found[1].items():
        torch.testing.assert_close(found[0][name], x, rtol=1e-4, atol=1e-5, msg=name)
