"""The Atlas family of the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights import reference
from fastweights.bench import cli, families, gate, runner
from fastweights.bench.atlas import ATLAS, ours, peers
from fastweights.bench.atlas.cases import OURS
from fastweights.ops import flops as counts

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-atlas-d32"], name="tiny", batch=2, tokens=80, heads=3, width=16, chunk_size=16,
    ns_stride=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return ATLAS.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    return gate.check(ATLAS, contender, inputs, contender.build(contender.case, inputs), seed + 1)


def test_headline_holds_what_was_asked_for():
    """Time by the Omega rule's: 2.5 at most, 2.0 is good, 1.6 the aim."""
    case = CASES["atlas-d64"]
    assert (case.batch * case.heads, case.tokens, case.width, case.dtype) == (
        1024,
        2048,
        64,
        "bf16",
    )
    assert case.ns_stride == case.chunk_size == 64
    (target,) = case.targets
    assert (target.against, target.measure, target.mode) == ("omega-momentum", "speed", "fwd")
    marks = (target.floor, target.good, target.aim)
    assert [round(1 / mark, 3) for mark in marks] == [2.5, 2.0, 1.6]
    few = CASES["atlas-d64-few"]
    assert few.batch * few.heads == 64


def test_case_counts_useful_flops_and_compulsory_bytes():
    case = CASES["atlas-d64"]
    a_head = counts.atlas_forward(2048, 64, 4, 64, 64, stride=64, steps=5)
    assert case.flops("fwd") == 1024 * a_head
    omega = peers._contender("omega-momentum", case).case
    alone = counts.omega_forward(2048, 64, 4, 64, 64, momentum=True, pairs=64)
    assert omega.flops("fwd") == 1024 * alone
    rows = 16 * 2048 * 64
    assert case.bytes("fwd") == rows * (4 * 64 * 2 + 4 * 8)
    assert omega.bytes("fwd") == rows * (4 * 64 * 2 + 4 * 7)


def test_counts_are_those_of_the_call():
    inputs = _inputs(TINY)
    read = sum(x.nbytes for x in inputs.leaves.values())
    assert TINY.bytes("fwd") == read + inputs.d_out.nbytes
    assert TINY.bytes("bwd") == 2 * read + inputs.d_out.nbytes
    work = ours.call(TINY, inputs, "auto")
    with FlopCounterMode(display=False) as forward:
        outputs = work.forward()
    with FlopCounterMode(display=False) as backward:
        work.backward(outputs)
    assert forward.get_total_flops() == TINY.flops("fwd")
    assert backward.get_total_flops() == TINY.flops("bwd")


@pytest.mark.parametrize("tokens", [80, 75, 7])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_chunks_in_torch_are_the_reference(window, tokens):
    case = replace(TINY, dtype="fp64", window=window, tokens=tokens)
    inputs = _inputs(case)
    found = []
    for call in (peers.chunked, lambda **given: reference.atlas_memory(**given)[0]):
        y = call(**inputs.leaves, **ours.rules(case))
        leaves = tuple(inputs.leaves.values())
        found.append((y, *torch.autograd.grad(y, leaves, inputs.d_out, materialize_grads=True)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def test_rows_of_the_family(monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiler(f, backend="aot_eager", **options)
    )
    names = ("omega-momentum", "eager", "compiled")
    case = replace(TINY, tokens=40, dtype="bf16", peers=names, modes=("fwd",))
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = {(row["contender"], row["mode"]): row for row in runner.run_case(
        case, ATLAS.contenders(case), options
    )}  # fmt: skip
    assert {name for name, _ in rows} == {OURS, "omega-momentum", "eager", "compiled"}
    assert {(row["status"], row["reason"]) for row in rows.values()} == {("ok", None)}
    assert rows[OURS, "fwd"]["ratio"]["peer"] == "omega-momentum"


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda y: y * 1.03, "out"),
        (lambda y: torch.cat((torch.zeros_like(y[:, :1]), y[:, :-1]), 1), "out"),
        (lambda y: 1.1 * y - 0.1 * y.detach(), "d_decay"),
    ],
    ids=["scaled", "read-before", "gradient-scaled"],
)
def test_wrong_implementation_fails(spoil, name):
    contender = ATLAS.ours(TINY, ("auto",))[0]

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: (spoil(*right()),))

    verdict = _check(replace(contender, build=build))
    assert any(line.startswith(f"small {name}:") for line in verdict.failures)
    assert any(line.startswith(f"full size {name}:") for line in verdict.failures)


def test_every_dtype_passes_its_own_gate():
    for dtype in ("fp32", "bf16"):
        verdict = _check(ATLAS.ours(TINY.in_dtype(dtype), ("auto",))[0])
        assert verdict.ok, (dtype, verdict.failures)


def test_command_runs_the_family(capsys):
    arguments = ["atlas", "--device", "cpu", "--cases", "cpu-atlas-d32"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "atlas_memory (eager)" in capsys.readouterr().out
