"""The cases as a pytest-benchmark suite: `pytest bench/ --benchmark-only`.

For tracking one call over time with that plugin's storage and comparison. It times eager calls one
contender at a time, device idle at both ends; ratios to peers are `fastweights bench`'s work.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.bench import ours, peers
from fastweights.bench.cases import select
from fastweights.bench.gate import check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Without a GPU the tiny case: this suite is then a check of itself.
SUITE = "headline" if DEVICE.type == "cuda" else "quick"


def _parameters() -> list[Any]:
    found = []
    for case in select(DEVICE.type, suite=SUITE):
        names = [c.name for c in (*ours.contenders(case), *peers.contenders(case, case.peers))]
        found += [
            pytest.param(case, name, mode, id=f"{case.name}-{name}-{mode}")
            for name in names
            for mode in case.modes
            if mode != "memory"
        ]
    return found


@pytest.mark.parametrize(("case", "name", "mode"), _parameters())
def test_attention(benchmark: Any, case: Any, name: str, mode: str) -> None:
    """Time one forward, or one backward alone, of one contender that passed its gate."""
    listed = [*ours.contenders(case), *peers.contenders(case, case.peers)]
    contender = next(found for found in listed if found.name == name)
    if contender.reason is not None:
        pytest.skip(contender.reason)
    seed = torch.seed() % 2**31
    inputs = ours.make_inputs(contender.case, torch.Generator(DEVICE).manual_seed(seed))
    work = contender.build(contender.case, inputs)
    verdict = check(contender, inputs, work, seed + 1)
    assert verdict.ok, verdict.failures
    outputs = work.forward()

    def call() -> None:
        with work.context():
            work.forward() if mode == "fwd" else work.backward(outputs)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(call, rounds=10, warmup_rounds=2)
    benchmark.extra_info["tflops"] = contender.case.flops(mode) / benchmark.stats["median"] / 1e12
