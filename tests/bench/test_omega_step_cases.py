"""The family of steps in the benchmark on a CPU: counts, the copy beside them, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.autotune.check import named
from fastweights.bench import cli, families, gate, runner
from fastweights.bench.family import Unavailable
from fastweights.bench.omega_step import OMEGA_STEP
from fastweights.bench.omega_step.cases import OURS
from fastweights.ops import alloc

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-step-8-d32"], name="tiny", rows=9, heads=3, width=16, window=3, chunk_size=4,
    dtype="bf16",
)  # fmt: skip
KINDS = {"plain": TINY, "momentum": replace(TINY, momentum=True, window=1)}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return OMEGA_STEP.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(OMEGA_STEP, contender, inputs, work, seed + 1)


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_what_was_asked_for():
    """A pool of 256 sequences of 16 heads is held to the copy's rate."""
    headline = [c for c in OMEGA_STEP.cases if c.device == "cuda" and "headline" in c.suites]
    held = {c.name: c for c in headline if c.targets}
    assert set(held) == {"step-256-d64", "step-256-d128"}
    for case in held.values():
        assert (case.rows, case.heads, case.dtype) == (256, 16, "bf16")
        assert (case.window, case.chunk_size, case.modes) == (4, 64, ("fwd",))
        (target,) = case.targets
        assert (target.contender, target.against, target.good) == (OURS, "copy", 0.85)
    assert {c.rows for c in OMEGA_STEP.cases if c.device == "cuda"} == {256, 64, 1}


def test_bytes_of_one_step():
    """Of a head of 64 columns by hand: M, 35 rows of the chunk on average, a fold in 64 steps."""
    case = CASES["step-256-d64"]
    rows = 67 + sum(range(4, 67))  # a chunk's first token finds all of the one before it
    each = 64 * (64 * 64 * 4 + (3 + 1) * 128 + 6 * 4 + 2 * 4 + 128 + 128 + 256)
    each += rows * (128 + 256 + 4) + 4 * sum(range(5, 68))
    each += 64 * 64 * 4 + 3 * (128 + 2 * 128 + 256) + 67 * 4
    assert case.bytes("fwd") == 256 * (16 * each // 64 + 24)
    assert 30_000 < case.bytes("fwd") / 4096 < 33_000
    assert CASES["step-64-d64"].bytes("fwd") * 4 == case.bytes("fwd")


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_torch_counts_the_flops_of_the_case(case):
    (contender,) = OMEGA_STEP.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        work.forward()
    assert counter.get_total_flops() == case.flops("fwd")


@pytest.mark.parametrize("case", OMEGA_STEP.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    rules = ("width", "window", "chunk_size", "momentum", "dtype")
    assert all(getattr(small, name) == getattr(case, name) for name in rules)
    assert small.rows * small.heads <= 10


def test_chunks_are_filled_to_all_degrees():
    """So that a call in which they are moves the mean number of bytes, and so does each replay."""
    cache = _inputs(replace(TINY, rows=8)).given["cache"]
    assert sorted(cache.filled.tolist()) == [1, 1, 2, 2, 3, 3, 4, 4]
    (contender,) = OMEGA_STEP.ours(replace(TINY, rows=8), ("auto",))
    work = contender.build(contender.case, _inputs(contender.case))
    for _ in range(3):
        work.forward()
        assert sorted(work.cache.filled.tolist()) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_same_token_keeps_a_memory_bounded():
    case = replace(TINY, dtype="fp32", chunk_size=16)
    (contender,) = OMEGA_STEP.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    for _ in range(100):
        (y,) = work.forward()
    assert y.square().mean() < 10
    assert work.cache.state.square().mean() < 10


# ---- rows and the gate --------------------------------------------------------------------------


def test_rows_of_the_family():
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = runner.run_case(TINY, OMEGA_STEP.contenders(TINY), options)
    assert [row["contender"] for row in rows] == [OURS, "copy"]
    ours, copy = rows
    assert (ours["status"], ours["backend"], copy["status"]) == ("ok", "eager", "ok")
    assert ours["ratio"]["peer"] == "copy"
    assert copy["gbps"] * copy["ms"] == pytest.approx(TINY.bytes("fwd") / 1e6)
    (first, second) = OMEGA_STEP.ours(TINY, ("eager", "triton"))
    assert (first.name, second.name) == (OURS, f"{OURS} [triton]")
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(TINY, _inputs(TINY))


def test_a_copy_moves_as_many_bytes():
    (copy,) = OMEGA_STEP.others(TINY, ("copy",), "model")
    (y,) = copy.build(TINY, _inputs(TINY)).forward()
    assert 0 <= TINY.bytes("fwd") - 2 * y.nbytes < 8
    assert not copy.checked


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_every_dtype_passes_its_own_gate(case, dtype):
    (contender,) = OMEGA_STEP.ours(case.in_dtype(dtype), ("auto",))
    verdict = _check(contender)
    assert verdict.ok, verdict.failures


def _spoiled(spoil):
    (contender,) = OMEGA_STEP.ours(TINY, ("auto",))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward

        def forward():
            (y,) = right()
            return (spoil(y, work.cache),)

        return replace(work, forward=forward)

    return replace(contender, build=build)


def _scaled(y, cache):
    return y * 1.03


def _state(y, cache):
    cache.state.mul_(1.01)
    return y


def _forgotten(y, cache):
    cache.write[..., -1] = 0.0
    return y


def _counted_twice(y, cache):
    cache.filled.add_(1)
    return y


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(_scaled, "out"), (_state, "state"), (_forgotten, "write"), (_counted_twice, "filled")],
)
def test_wrong_implementation_fails(spoil, name):
    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert any(line.startswith(f"small {name}:") for line in verdict.failures)
    assert any(line.startswith(f"full size {name}:") for line in verdict.failures)


def test_every_number_is_seen_to_be_written():
    """Unwritten memory that holds the right numbers by luck, where nothing is compared."""

    def spoil(y, cache):
        fresh = alloc.empty(y.shape, dtype=y.dtype, device=CPU)
        lucky = fresh if alloc._poisoned else y
        one = torch.zeros(y.shape, dtype=torch.bool)
        one[4, 0, 3] = y.shape[0] == TINY.rows
        return torch.where(one, lucky, y)

    verdict = _check(_spoiled(spoil))
    assert verdict.failures == [f"ValueError: out: 1 of {9 * 3 * 16} numbers are not finite"]


def test_each_contender_has_a_pool_of_its_own():
    inputs = _inputs(TINY)
    before = {name: x.clone() for name, x in named(inputs.given["cache"]).items()}
    (contender,) = OMEGA_STEP.ours(TINY, ("auto",))
    for _ in range(2):
        contender.build(TINY, inputs).forward()
    assert all(torch.equal(x, before[name]) for name, x in named(inputs.given["cache"]).items())


def test_command_runs_the_family(capsys):
    arguments = ["omega_step", "--device", "cpu", "--cases", "cpu-step-8-d32"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "omega_step_ (eager)" in capsys.readouterr().out
