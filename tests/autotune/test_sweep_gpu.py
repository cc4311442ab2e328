"""A sweep on a GPU: graphs, events, and what a table changes for a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastweights import ops
from fastweights.autotune import Device, cases, space, sweep, tables
from fastweights.ops.newton_schulz import tuning as newton_schulz
from fastweights.ops.polar_attention import tuning as polar

pytestmark = pytest.mark.gpu


def test_a_quick_sweep_finds_right_configs_and_calls_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path))
    monkeypatch.setattr(cases, "QUICK", 3)
    space.reload()
    here = Device.of(device)
    problems = [newton_schulz.problem(m=32, n=32, B=4096), polar.problem(T=1024, D=64, Hq=8)]
    found = cases.collect(problems, device)
    assert {"fwd", "bwd"} <= {case.space.pass_ for case in found}
    how = sweep.Options(device, tables.path_of(here.name), tmp_path / "log", effort="quick", seed=3)
    outcome = sweep.sweep(found, how)
    assert outcome.failed == outcome.hopeless == outcome.left == []
    assert len(outcome.rows) == len(found)
    for case, row in zip(found, outcome.rows, strict=True):
        assert all(ms > 0 for ms in row.times.values())
        assert row.times[row.winner] <= row.times[row.default]
        assert row.notes["flops"] > 0
        assert row.notes["kernels"][0]["registers"] > 0 or case.space.backend == "cuda"
    x = torch.randn(4096, 32, 32, device=device, dtype=torch.bfloat16)
    said = ops.explain(ops.newton_schulz, x)
    assert said.origins["fwd"] == f"own table {here.name}"
    again = sweep.sweep(found, how)
    assert again.rows == outcome.rows
    space.reload()
