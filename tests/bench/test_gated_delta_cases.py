"""The family of the gated delta rule in the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.bench import cli, families, gate, runner
from fastweights.bench.family import Unavailable
from fastweights.bench.gated_delta import GATED_DELTA
from fastweights.bench.gated_delta.cases import OURS

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-delta"], name="tiny", tokens=130, width=16, dtype="bf16", peers=("eager", "compiled")
)
KINDS = {"groups": TINY, "l2norm": replace(TINY, groups=1, l2norm=True)}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return GATED_DELTA.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(GATED_DELTA, contender, inputs, work, seed + 1)


def test_headline_is_what_was_asked_for():
    """The three sizes of the published rows of fla, and what is to be reached beside them."""
    held = [c for c in GATED_DELTA.cases if c.device == "cuda" and c.targets]
    marks = {}
    for case in held:
        assert (case.width, case.dtype) == (128, "bf16")
        (target,) = case.targets
        assert (target.contender, target.mode, target.against) == (OURS, "fwd", "fla")
        marks[case.batch, case.tokens, case.heads] = (target.floor, target.good)
    assert marks == {
        (1, 8192, 16): (1.0, 1.4),
        (1, 32768, 8): (1.2, 2.0),
        (8, 4096, 16): (1.2, 1.8),
    }


def test_bytes_by_hand():
    case = CASES["delta-8k-h64-groups"]
    token = 2 * 16 * 128 * 2 + 64 * 128 * 2 + 2 * 64 * 4
    assert case.bytes("fwd") == 8192 * (token + 64 * 128 * 2)
    assert case.bytes("bwd") == 8192 * (2 * token + 64 * 128 * 2)


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_torch_counts_the_flops_of_the_case(case):
    (contender,) = GATED_DELTA.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        work.forward()
    assert counter.get_total_flops() == case.flops("fwd")


@pytest.mark.parametrize("case", GATED_DELTA.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    assert (small.width, small.groups, small.l2norm) == (case.width, case.groups, case.l2norm)
    assert (small.batch, small.tokens % 64 != 0) == (1, True)


def test_rows_of_the_family():
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    case = replace(TINY, peers=("fla", "eager"), modes=("fwd",))
    rows = runner.run_case(case, GATED_DELTA.contenders(case), options)
    assert [row["contender"] for row in rows] == [OURS, "fla", "eager"]
    assert [row["status"] for row in rows] == ["ok", "unavailable", "ok"]
    (_, second) = GATED_DELTA.ours(TINY, ("eager", "triton"))
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(TINY, _inputs(TINY))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("modes", [("fwd",), ("fwd", "bwd")], ids=str)
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_every_dtype_passes_its_own_gate(case, modes, dtype):
    (contender,) = GATED_DELTA.ours(replace(case.in_dtype(dtype), modes=modes), ("auto",))
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_compiled_computes_the_same(case):
    (contender,) = GATED_DELTA.others(case, ("compiled",), "model")
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


def test_wrong_implementation_fails():
    (contender,) = GATED_DELTA.ours(TINY, ("auto",))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: (right()[0] * 1.03,))

    verdict = _check(replace(contender, build=build))
    assert not verdict.ok
    assert any(line.startswith("small out:") for line in verdict.failures)
    assert any(line.startswith("full size out:") for line in verdict.failures)


def test_command_runs_the_family(capsys):
    arguments = ["gated_delta", "--device", "cpu", "--cases", "cpu-delta"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "gated_delta_rule (eager)" in capsys.readouterr().out
