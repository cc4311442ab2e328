"""The gated delta rule as a pytest-benchmark suite: `pytest bench/ --benchmark-only`."""

from __future__ import annotations

from typing import Any

import pytest

from fastweights.bench import speed


@pytest.mark.parametrize(("contender", "mode"), speed.parameters("gated_delta"))
def test_gated_delta(benchmark: Any, contender: Any, mode: str) -> None:
    """Time one call of one contender that passed its gate."""
    speed.measure(benchmark, contender, mode)
