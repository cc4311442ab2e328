"""The family of the delta rewrite in the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights import reference
from fastweights.bench import cli, families, gate, runner
from fastweights.bench.delta_rewrite import DELTA_REWRITE
from fastweights.bench.delta_rewrite.cases import FUNCTIONAL, IN_PLACE
from fastweights.bench.delta_rewrite.peers import plain
from fastweights.bench.family import Unavailable

CPU = torch.device("cpu")
CASES = families.cases()
BASE = replace(
    CASES["cpu-write-slots"], name="tiny", rows=3, tokens=5, width=8, values=11, dtype="bf16"
)
KINDS = {
    "write": BASE,
    "read": replace(BASE, reads=7),
    "layer": replace(BASE, reads=7, calls=1, contenders=(FUNCTIONAL,), peers=()),
    "train": replace(
        BASE, reads=7, calls=1, contenders=(FUNCTIONAL,), peers=(), modes=("fwd", "bwd")
    ),
}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return DELTA_REWRITE.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(DELTA_REWRITE, contender, inputs, work, seed + 1)


def _ours(case):
    (contender,) = DELTA_REWRITE.ours(case, ("auto",))
    return contender


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_what_was_asked_for():
    write, both, layer = (
        CASES[name] for name in ("write-16-slots", "rewrite-read-16-slots", "rewrite-gpt2-layer")
    )
    for case, reads in ((write, 0), (both, 1024)):
        sizes = (case.rows, case.tokens, case.reads, case.wide, case.values, case.calls)
        assert sizes == (16, 128, reads, 384, 2048, 4)
        assert case.function == IN_PLACE
    (target,) = write.targets
    assert (target.against, target.floor, target.aim) == ("copy", 0.6, 0.9)
    (target,) = both.targets
    assert target.floor == pytest.approx(1 / 2.0, abs=0.01)
    assert target.aim == pytest.approx(1 / 1.3, abs=0.01)
    assert (layer.rows, layer.tokens, layer.reads, layer.wide, layer.values) == (
        1,
        10,
        522,
        384,
        768,
    )
    (target,) = layer.targets
    assert (target.against, target.floor, target.aim) == ("compiled", 3.0, 6.0)
    assert all("headline" in case.suites for case in (write, both, layer))


def test_bytes_and_flops():
    write, both = CASES["write-16-slots"], CASES["rewrite-read-16-slots"]
    tokens = 128 * ((64 + 2048) * 2 + 4)
    assert write.bytes("fwd") == 4 * 16 * (2 * 384 * 2049 * 4 + tokens)
    assert both.bytes("fwd") - write.bytes("fwd") == 4 * 16 * 1024 * (64 + 2048) * 2
    assert write.flops("fwd") == 4 * 16 * 4 * 128 * 384 * 2048
    assert both.flops("fwd") - write.flops("fwd") == 4 * 16 * 2 * 1024 * 384 * 2048


def test_bytes_of_a_backward():
    """Three memories; of rows all but y is read or written twice."""
    case = CASES["rewrite-gpt2-train"]
    rows = 2 * 10 * ((64 + 768) * 2 + 4) + 522 * (2 * 64 + 768) * 2
    assert case.bytes("bwd") == 16 * (3 * 384 * 769 * 4 + rows)


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_torch_counts_the_flops_of_the_case(case):
    work = _ours(case).build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        outputs = work.forward()
    assert counter.get_total_flops() == case.flops("fwd")
    if case.trained:
        with FlopCounterMode(display=False) as counter:
            work.backward(outputs)
        assert counter.get_total_flops() == case.flops("bwd")


@pytest.mark.parametrize("case", DELTA_REWRITE.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    rules = ("tokens", "width", "dtype", "contenders")
    assert all(getattr(small, name) == getattr(case, name) for name in rules)
    assert bool(small.reads) == bool(case.reads)
    assert small.rows * small.wide * small.values <= 200_000


# ---- rows and the gate --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "read"])
def test_rows_of_the_family(kind):
    peer = {"write": "copy", "read": "matmul"}[kind]
    case = replace(KINDS[kind], peers=(peer,))
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = runner.run_case(case, DELTA_REWRITE.contenders(case), options)
    assert [(row["contender"], row["status"]) for row in rows] == [(IN_PLACE, "ok"), (peer, "ok")]
    assert rows[0]["backend"] == "eager"
    assert rows[0]["ratio"]["peer"] == peer
    (first, second) = DELTA_REWRITE.ours(case, ("eager", "triton"))
    assert (first.name, second.name) == (IN_PLACE, f"{IN_PLACE} [triton]")
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(case, _inputs(case))


def test_the_compiled_peer_computes_the_same():
    given = _inputs(KINDS["layer"].in_dtype("fp64")).given
    given = {name: x.requires_grad_() for name, x in given.items()}
    found = [plain(**given), reference.delta_rewrite(**given)]
    upstream = [x.detach().cos() for x in found[0]]
    gradients = [torch.autograd.grad(x, list(given.values()), upstream) for x in found]
    for pairs in (found, gradients):
        for got, wanted in zip(*pairs, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    (peer,) = DELTA_REWRITE.others(CASES["cpu-rewrite-layer"], ("compiled",), "model")
    assert (peer.name, peer.checked, peer.modes) == ("compiled", True, ("fwd",))


def test_a_copy_moves_as_many_bytes():
    (copy,) = DELTA_REWRITE.others(BASE, ("copy",), "model")
    (y,) = copy.build(BASE, _inputs(BASE)).forward()
    assert 0 <= BASE.bytes("fwd") - 2 * y.nbytes < 8


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_every_dtype_passes_its_own_gate(case, dtype):
    verdict = _check(_ours(case.in_dtype(dtype)))
    assert verdict.ok, verdict.failures


def test_a_pool_rewritten_again_and_again_stays_bounded():
    case = replace(BASE, dtype="fp32", calls=1)
    work = _ours(case).build(case, _inputs(case))
    for _ in range(100):
        work.forward()
    assert work.memory["state"].abs().max() < 30


def test_a_wrong_gradient_fails():
    contender = _ours(KINDS["train"].in_dtype("fp32"))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.backward
        work.backward = lambda outputs: [1.03 * g for g in right(outputs)]
        return work

    verdict = _check(replace(contender, build=build))
    assert not verdict.ok
    for name in ("d_k", "d_v", "d_beta", "d_state", "d_normalizer", "d_q"):
        for where in ("small", "full size"):
            assert any(line.startswith(f"{where} {name}:") for line in verdict.failures)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda y, memory: y.mul_(1.03), "y"),
        (lambda y, memory: memory["state"].mul_(1.03), "state"),
        (lambda y, memory: memory["normalizer"].mul_(1.03), "normalizer"),
    ],
    ids=["y", "state", "normalizer"],
)
def test_wrong_implementation_fails(spoil, name):
    contender = _ours(KINDS["read"])

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward

        def forward():
            (y,) = right()
            spoil(y, work.memory)
            return (y,)

        return replace(work, forward=forward)

    verdict = _check(replace(contender, build=build))
    assert not verdict.ok
    for where in ("small", "full size"):
        assert any(line.startswith(f"{where} {name}:") for line in verdict.failures)


def test_command_runs_the_family(capsys):
    arguments = ["delta_rewrite", "--device", "cpu", "--cases", "cpu-write-slots"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "delta_rewrite_ (eager)" in capsys.readouterr().out
