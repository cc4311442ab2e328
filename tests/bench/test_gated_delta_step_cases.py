"""The family of gated delta steps in the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.bench import cli, families, gate, runner
from fastweights.bench.family import Unavailable
from fastweights.bench.gated_delta_step import GATED_DELTA_STEP
from fastweights.bench.gated_delta_step.cases import OURS
from fastweights.ops import alloc

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-delta-step"], name="tiny", rows=9, heads=4, width=16, dtype="bf16",
    peers=("copy", "eager", "gathered"),
)  # fmt: skip
KINDS = {"groups": TINY, "plain": replace(TINY, groups=1)}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return GATED_DELTA_STEP.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(GATED_DELTA_STEP, contender, inputs, work, seed + 1)


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_what_was_asked_for():
    """Pools of 64 sequences or more, of 16 or 32 heads of 128, are held to the copy's rate."""
    headline = [c for c in GATED_DELTA_STEP.cases if c.device == "cuda" and "headline" in c.suites]
    held = {c.name: c for c in headline if c.targets}
    assert {(c.rows, c.heads) for c in held.values()} == {(64, 16), (64, 32), (256, 16)}
    for case in held.values():
        assert (case.width, case.dtype, case.modes) == (128, "bf16", ("fwd",))
        (target,) = case.targets
        assert (target.contender, target.against) == (OURS, "copy")
        assert (target.floor, target.aim) == (0.8, 0.95)


def test_bytes_by_hand():
    case = CASES["delta-step-64-h32-groups"]
    head = 2 * 128 * 128 * 4 + 2 * 128 * 2 + 2 * 4
    assert case.bytes("fwd") == 64 * (32 * head + 16 * 2 * 128 * 2 + 8)


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_torch_counts_the_flops_of_the_case(case):
    (contender,) = GATED_DELTA_STEP.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        work.forward()
    assert counter.get_total_flops() == case.flops("fwd")


@pytest.mark.parametrize("case", GATED_DELTA_STEP.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    assert (small.width, small.groups, small.dtype) == (case.width, case.groups, case.dtype)
    assert small.rows * small.heads <= 20


def test_the_same_token_keeps_a_memory_bounded():
    (contender,) = GATED_DELTA_STEP.ours(replace(TINY, dtype="fp32"), ("auto",))
    work = contender.build(contender.case, _inputs(contender.case))
    for _ in range(100):
        (o,) = work.forward()
    assert o.square().mean() < 10
    assert work.pool.square().mean() < 10


# ---- rows and the gate --------------------------------------------------------------------------


def test_rows_of_the_family():
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = runner.run_case(TINY, GATED_DELTA_STEP.contenders(TINY), options)
    assert [row["contender"] for row in rows] == [OURS, "copy", "eager", "gathered"]
    assert {row["status"] for row in rows} == {"ok"}
    assert rows[0]["backend"] == "eager"
    assert rows[0]["ratio"]["peer"] == "copy"
    assert rows[1]["gbps"] * rows[1]["ms"] == pytest.approx(TINY.bytes("fwd") / 1e6)
    (first, second) = GATED_DELTA_STEP.ours(TINY, ("eager", "triton"))
    assert (first.name, second.name) == (OURS, f"{OURS} [triton]")
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(TINY, _inputs(TINY))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_every_dtype_passes_its_own_gate(case, dtype):
    (contender,) = GATED_DELTA_STEP.ours(case.in_dtype(dtype), ("auto",))
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


@pytest.mark.parametrize("name", ["gathered", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_peers_compute_the_same(case, name):
    (contender,) = GATED_DELTA_STEP.others(replace(case, peers=(name,)), (name,), "model")
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


def _spoiled(spoil):
    (contender,) = GATED_DELTA_STEP.ours(TINY, ("auto",))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward

        def forward():
            (o,) = right()
            return (spoil(o, work.pool),)

        return replace(work, forward=forward)

    return replace(contender, build=build)


def _scaled(o, pool):
    return o * 1.03


def _memory(o, pool):
    pool.mul_(1.01)
    return o


@pytest.mark.parametrize(("spoil", "name"), [(_scaled, "out"), (_memory, "state_pool")])
def test_wrong_implementation_fails(spoil, name):
    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert any(line.startswith(f"small {name}:") for line in verdict.failures)
    assert any(line.startswith(f"full size {name}:") for line in verdict.failures)


def test_every_number_is_seen_to_be_written():
    """Unwritten memory that holds the right numbers by luck, where nothing is compared."""

    def spoil(o, pool):
        fresh = alloc.empty(o.shape, dtype=o.dtype, device=CPU)
        one = torch.zeros(o.shape, dtype=torch.bool)
        one[4, 0, 3] = o.shape[0] == TINY.rows
        return torch.where(one, fresh if alloc._poisoned else o, o)

    verdict = _check(_spoiled(spoil))
    assert verdict.failures == [f"ValueError: out: 1 of {9 * 4 * 16} numbers are not finite"]


def test_each_contender_has_a_pool_of_its_own():
    inputs = _inputs(TINY)
    before = inputs.given["state_pool"].clone()
    for contender in GATED_DELTA_STEP.contenders(TINY):
        contender.build(TINY, inputs).forward()
    assert torch.equal(inputs.given["state_pool"], before)


def test_command_runs_the_family(capsys):
    arguments = ["gated_delta_step", "--device", "cpu", "--cases", "cpu-delta-step"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "gated_delta_step_ (eager)" in capsys.readouterr().out
