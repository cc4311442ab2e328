"""The family of short convolutions in the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.bench import cli, families, gate, runner
from fastweights.bench.family import Unavailable
from fastweights.bench.short_conv import SHORT_CONV
from fastweights.bench.short_conv.cases import OURS
from fastweights.ops import alloc

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-conv-lfm2"], name="tiny", batch=2, tokens=20, channels=204, dtype="bf16",
    peers=("copy", "eager"),
)  # fmt: skip
KINDS = {
    "lfm2": TINY,
    "canon": replace(TINY, taps=4, gates=False, residual=True),
    "silu": replace(TINY, gates=False, silu=True),
}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return SHORT_CONV.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(SHORT_CONV, contender, inputs, work, seed + 1)


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_what_was_asked_for():
    """Forward is held to the copy's rate."""
    headline = [c for c in SHORT_CONV.cases if c.device == "cuda" and "headline" in c.suites]
    assert {c.name for c in headline} == {"conv-lfm2-d2048", "conv-lfm2-d1024", "conv-canon-d2048"}
    for case in headline:
        assert (case.batch, case.tokens, case.dtype, case.modes) == (
            8,
            4096,
            "bf16",
            ("fwd", "bwd"),
        )
        (target,) = case.targets
        assert (target.contender, target.against, target.mode) == (OURS, "copy", "fwd")
        assert (target.floor, target.aim) == (0.85, 0.97)


def test_bytes_by_hand():
    case = CASES["conv-lfm2-d2048"]
    row = 8 * 4096 * 2048 * 2
    weight, state = 2048 * 3 * 2, 8 * 2 * 2048 * 4
    assert case.bytes("fwd") == 4 * row + weight + state
    assert case.bytes("bwd") == 7 * row + 2 * weight + state
    canon = CASES["conv-canon-d2048"]
    assert canon.bytes("fwd") == 2 * row + 2048 * 4 * 2 + 8 * 3 * 2048 * 4
    assert canon.bytes("bwd") == 3 * row + 2 * 2048 * 4 * 2 + 8 * 3 * 2048 * 4


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_torch_counts_the_flops_of_the_case(case):
    (contender,) = SHORT_CONV.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        outputs = work.forward()
    assert counter.get_total_flops() == case.flops("fwd")
    with FlopCounterMode(display=False) as counter:
        work.backward(outputs)
    assert counter.get_total_flops() == case.flops("bwd")


@pytest.mark.parametrize("case", SHORT_CONV.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    rules = ("taps", "gates", "silu", "residual", "dtype")
    assert all(getattr(small, name) == getattr(case, name) for name in rules)
    assert small.batch * small.tokens * small.channels <= 2 * 75 * 200


# ---- rows and the gate --------------------------------------------------------------------------


def test_rows_of_the_family():
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = runner.run_case(TINY, SHORT_CONV.contenders(TINY), options)
    found = {(row["contender"], row["mode"]): row for row in rows}
    assert set(found) == {
        (OURS, "fwd"), ("copy", "fwd"), ("eager", "fwd"), (OURS, "bwd"), ("eager", "bwd"),
    }  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"}
    copy = found["copy", "fwd"]
    assert copy["gbps"] * copy["ms"] == pytest.approx(TINY.bytes("fwd") / 1e6)
    assert found[OURS, "fwd"]["ratio"]["peer"] == "copy"
    (first, second) = SHORT_CONV.ours(TINY, ("eager", "triton"))
    assert (first.name, second.name) == (OURS, f"{OURS} [triton]")
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(TINY, _inputs(TINY))


def test_a_copy_moves_as_many_bytes():
    (copy,) = SHORT_CONV.others(TINY, ("copy",), "model")
    (y,) = copy.build(TINY, _inputs(TINY)).forward()
    assert 0 <= TINY.bytes("fwd") - 2 * y.nbytes < 8
    assert not copy.checked


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_every_dtype_passes_its_own_gate(case, dtype):
    (contender,) = SHORT_CONV.ours(case.in_dtype(dtype), ("auto",))
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_compiled_computes_the_same(case):
    case = replace(case, peers=("compiled",))
    (contender,) = SHORT_CONV.others(case, ("compiled",), "model")
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


def _spoiled(spoil):
    (contender,) = SHORT_CONV.ours(TINY, ("auto",))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: (spoil(right()[0]),))

    return replace(contender, build=build)


def test_wrong_implementation_fails():
    verdict = _check(_spoiled(lambda y: y * 1.03))
    assert not verdict.ok
    for where in ("small out", "full size out", "small d_x", "full size d_weight"):
        assert any(line.startswith(f"{where}:") for line in verdict.failures), where


def test_every_number_is_seen_to_be_written():
    """Unwritten memory that holds the right numbers by luck, where nothing is compared."""

    def spoil(y):
        fresh = alloc.empty(y.shape, dtype=y.dtype, device=CPU)
        one = torch.zeros(y.shape, dtype=torch.bool)
        one[0, 3, 1] = y.shape[2] == TINY.channels
        return torch.where(one, fresh if alloc._poisoned else y, y)

    verdict = _check(_spoiled(spoil))
    assert verdict.failures == [f"ValueError: out: 1 of {2 * 20 * 204} numbers are not finite"]


def test_command_runs_the_family(capsys):
    arguments = ["short_conv", "--device", "cpu", "--cases", "cpu-conv-lfm2"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "short_conv (eager)" in capsys.readouterr().out
