"""A family's cases under pytest-benchmark: what the `test_*_speed.py` files share.

For tracking one call over time with that plugin's storage and comparison. It times eager calls one
contender at a time, device idle at both ends; ratios to peers are `fastweights bench`'s work.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .families import FAMILIES, select
from .family import Unavailable
from .gate import check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Without a GPU the tiny case: the suite is then a check of itself.
SUITE = "headline" if DEVICE.type == "cuda" else "quick"


def parameters(op: str) -> list[Any]:
    """(contender, mode) of every row that `fastweights bench` would time."""
    return [
        pytest.param(contender, mode, id=f"{case.name}-{contender.name}-{mode}")
        for case in select(DEVICE.type, suite=SUITE, ops=[op])
        for contender in FAMILIES[op].contenders(case)
        for mode in case.modes
        if mode != "memory" and mode in contender.modes
    ]


def measure(benchmark: Any, contender: Any, mode: str) -> None:
    """Time one forward, or one backward alone, of one contender that passed its gate."""
    if contender.reason is not None:
        pytest.skip(contender.reason)
    family = FAMILIES[contender.case.op]
    seed = torch.seed() % 2**31
    inputs = family.inputs(contender.case, torch.Generator(DEVICE).manual_seed(seed))
    try:
        work = contender.build(contender.case, inputs)
    except Unavailable as reason:
        pytest.skip(str(reason))
    verdict = check(family, contender, inputs, work, seed + 1)
    assert verdict is None or verdict.ok, verdict.failures
    with work.context():
        outputs = work.forward()

    def call() -> None:
        with work.context():
            work.forward() if mode == "fwd" else work.backward(outputs)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(call, rounds=10, warmup_rounds=2)
    benchmark.extra_info["tflops"] = contender.case.flops(mode) / benchmark.stats["median"] / 1e12
