"""The family of polynomial features in the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.bench import cli, families, gate, runner
from fastweights.bench.polynomial import POLYNOMIAL
from fastweights.bench.polynomial.cases import FEATURES, READ, UPDATE
from fastweights.bench.polynomial.ours import FUNCTIONS
from fastweights.ops import alloc

CPU = torch.device("cpu")
CASES = families.cases()
TINY = {
    case.function: replace(case, name="tiny", tokens=40, heads=3, width=5, dtype="bf16")
    for case in (CASES["cpu-expand-d16"], CASES["cpu-read-d16"], CASES["cpu-update-d16"])
}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return POLYNOMIAL.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(POLYNOMIAL, contender, inputs, work, seed + 1)


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_what_was_asked_for():
    headline = {
        c.function: c for c in POLYNOMIAL.cases if c.device == "cuda" and "headline" in c.suites
    }
    assert headline.keys() == FUNCTIONS.keys()
    for function, case in headline.items():
        assert (case.batch, case.tokens, case.heads, case.width) == (4, 8192, 16, 64)
        (target,) = case.targets
        marks = (0.7, 0.85, 0.95) if function == FEATURES else (1.5, 3.0, 5.0)
        assert (target.floor, target.good, target.aim) == marks
        assert target.against == ("copy" if function == FEATURES else "expanded")
    assert headline[READ].wide == 2144


def test_bytes_and_flops():
    expand, read, update = (CASES[f"{name}-d64"] for name in ("expand", "read", "update"))
    rows, features = 4 * 8192 * 16, 2144
    x, memory = rows * 64 * 2, 64 * features * 64 * 4
    assert expand.bytes("fwd") == x + rows * features * 2
    assert read.bytes("fwd") == update.bytes("fwd") == 2 * x + memory
    assert expand.bytes("bwd") == 2 * x + rows * features * 2
    assert read.bytes("bwd") == 3 * x + 2 * memory
    assert update.bytes("bwd") == 4 * x + memory
    assert read.flops("fwd") == update.flops("fwd") == 2 * rows * features * 64
    assert expand.flops("fwd") == rows * features


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_torch_counts_the_flops_of_the_case(case):
    (contender,) = POLYNOMIAL.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        outputs = work.forward()
        forward = counter.get_total_flops()
        work.backward(outputs)
    assert forward == case.flops("fwd")
    assert counter.get_total_flops() - forward == case.flops("bwd")


@pytest.mark.parametrize("case", POLYNOMIAL.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    rules = ("function", "width", "values", "dtype")
    assert all(getattr(small, name) == getattr(case, name) for name in rules)
    assert small.rows <= 300


# ---- rows and the gate --------------------------------------------------------------------------


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_rows_of_the_family(case):
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = runner.run_case(case, POLYNOMIAL.contenders(case), options)
    peer = "copy" if case.function == FEATURES else "expanded"
    of_peer = ["fwd"] if peer == "copy" else ["fwd", "bwd"]
    wanted = {(case.function, "fwd"), (case.function, "bwd"), *((peer, mode) for mode in of_peer)}
    assert {(row["contender"], row["mode"]) for row in rows} == wanted
    assert all(row["status"] == "ok" for row in rows), [row.get("reason") for row in rows]
    assert {row["backend"] for row in rows if row["contender"] == case.function} == {"eager"}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_every_dtype_passes_its_own_gate(case, dtype):
    for contender in POLYNOMIAL.contenders(case.in_dtype(dtype)):
        verdict = _check(contender)
        if contender.checked:
            assert verdict.ok, verdict.failures


def _spoiled(case, spoil):
    (contender,) = POLYNOMIAL.ours(case, ("auto",))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: (spoil(right()[0]),))

    return replace(contender, build=build)


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_wrong_implementation_fails(case):
    verdict = _check(_spoiled(case, lambda out: out * 1.03))
    assert not verdict.ok
    for where in ("small", "full size"):
        assert any(line.startswith(f"{where} out:") for line in verdict.failures)
        assert any(line.startswith(f"{where} d_x:") for line in verdict.failures)


@pytest.mark.parametrize("function", [READ, UPDATE])
def test_every_number_is_seen_to_be_written(function):
    """Unwritten memory that holds the right numbers by luck, where nothing is compared."""
    case = TINY[function]

    def spoil(out):
        fresh = alloc.empty(out.shape, dtype=out.dtype, device=CPU)
        one = torch.zeros(out.shape, dtype=torch.bool)
        one[0, 0, 0, 0] = case.heads in out.shape  # of the first head, and not of the small case
        return torch.where(one, fresh if alloc._poisoned else out, out)

    (line,) = _check(_spoiled(case, spoil)).failures
    assert line.startswith("ValueError: out: 1 of ")


def test_command_runs_the_family(capsys):
    arguments = ["polynomial", "--device", "cpu", "--cases", "cpu-read-d16"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "polynomial_read (eager)" in capsys.readouterr().out
