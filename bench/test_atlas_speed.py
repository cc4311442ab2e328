"""The Atlas cases as a pytest-benchmark suite: `pytest bench/ --benchmark-only`."""

from __future__ import annotations

from typing import Any

import pytest

from fastweights.bench import speed


@pytest.mark.parametrize(("contender", "mode"), speed.parameters("atlas"))
def test_atlas(benchmark: Any, contender: Any, mode: str) -> None:
    """Time one forward, or one backward alone, of one contender that passed its gate."""
    speed.measure(benchmark, contender, mode)
