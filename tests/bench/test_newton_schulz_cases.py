"""The Newton–Schulz family of the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights import reference
from fastweights.bench import cli, families, gate, runner
from fastweights.bench.newton_schulz import NEWTON_SCHULZ, peers
from fastweights.bench.newton_schulz.cases import OURS
from fastweights.ops import alloc, dispatch
from fastweights.ops import flops as counts

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(CASES["cpu-ns-16x32x32"], name="tiny", batch=12, rows=16, cols=24, dtype="bf16")

# Issued bars: (forward, backward) against eager, floor, good and aim.
BARS = {
    "ns-8192x64x64": ((9, 10.5, 12), (5, 8, 12)),
    "ns-2048x128x128": ((4.5, 5.5, 6.5), (3, 4, 6)),
    "ns-1024x256x256": ((2, 2.5, 3), (1.5, 2, 3)),
    "ns-16384x32x32": ((9.5, 12, 16), (5, 8, 12)),
    "ns-2048x64x256": ((6.5, 7.5, 9), (3, 4, 6)),
    "ns-1024x128x256": ((3, 4, 5), (1.5, 2, 3)),
    "ns-4096x4096": ((1.15, 1.25, 1.45), None),
    "ns-2048x8192": ((1.2, 1.6, 2.2), None),
}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _options(**changes) -> runner.Options:
    return runner.Options(device=CPU, seed=3, seconds=0.01, **changes)


def _inputs(case, seed=0):
    return NEWTON_SCHULZ.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(NEWTON_SCHULZ, contender, inputs, work, seed + 1)


def _rows(case, **options):
    found = NEWTON_SCHULZ.contenders(case)
    rows = runner.run_case(case, found, _options(**options))
    return {(row["contender"], row["mode"]): row for row in rows}


# ---- cases --------------------------------------------------------------------------------------


def _gpu(suite):
    return [c for c in NEWTON_SCHULZ.cases if c.device == "cuda" and suite in c.suites]


@pytest.mark.parametrize("case", _gpu("headline"), ids=lambda case: case.name)
def test_headline_cases_bear_the_bars(case):
    sizes = [case.batch, case.rows, case.cols]
    assert case.name == "ns-" + "x".join(str(n) for n in sizes if n != 1)
    assert (case.dtype, case.steps, case.modes) == ("bf16", 5, ("fwd", "bwd"))
    speeds = {t.mode: (t.floor, t.good, t.aim) for t in case.targets if t.measure == "speed"}
    forward, backward = BARS[case.name]
    assert (speeds["fwd"], speeds.get("bwd")) == (forward, backward)
    assert {t.against for t in case.targets} == {"eager"}
    assert {t.measure for t in case.targets} - {"speed"} == {"error", "gradient error"}


def test_headline_and_crossover_are_complete():
    assert {case.name for case in _gpu("headline")} == set(BARS)
    crossover = _gpu("crossover")
    assert {case.rows for case in crossover} == {64, 128, 256, 512}
    assert {case.batch for case in crossover} >= {1, 64}
    for case in crossover:
        assert {t.against for t in case.targets} == {"eager", "compiled"}
        assert {t.floor for t in case.targets} == {0.95}


def test_recorded_errors_can_be_judged():
    measured = set(NEWTON_SCHULZ.ratios.values())
    for case in NEWTON_SCHULZ.cases:
        assert {t.measure for t in case.targets} <= {"speed"} | measured
    assert "orthogonality" in {
        t.measure for t in CASES["ns-converged-2048x64x256"].targets
    }  # fmt: skip


def test_case_counts_useful_flops_and_compulsory_bytes():
    case = CASES["ns-2048x64x256"]
    step = 4 * 64 * 64 * 256 + 2 * 64**3
    assert case.flops("fwd") == 2048 * 5 * step
    assert case.flops("bwd") == 2048 * counts.newton_schulz_backward(64, 256, 5)
    assert case.bytes("fwd") == 2 * 2 * 2048 * 64 * 256
    assert case.bytes("bwd") == 3 * 2 * 2048 * 64 * 256
    tall = replace(case, rows=256, cols=64)
    assert tall.flops("fwd") == case.flops("fwd")


@pytest.mark.parametrize("peer", ["eager", "matmul-floor"])
@pytest.mark.parametrize("size", [(16, 24), (24, 16)], ids=str)
def test_peers_run_the_flops_that_are_counted(peer, size):
    case = replace(TINY, rows=size[0], cols=size[1])
    (contender,) = NEWTON_SCHULZ.others(case, (peer,), "model")
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        work.forward()
    assert counter.get_total_flops() == case.flops("fwd")


@pytest.mark.parametrize("case", NEWTON_SCHULZ.cases, ids=lambda case: case.name)
def test_small_case_keeps_what_chooses_a_kernel(case):
    small = case.small()
    assert small.batch <= 5
    if min(case.rows, case.cols) <= 256:
        assert (small.rows, small.cols) == (case.rows, case.cols)
    else:
        assert min(small.rows, small.cols) > 256
        assert small.cols / small.rows == case.cols / case.rows
    assert small.flops("fwd") <= 2e10


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 24), (24, 16)], ids=str)
@pytest.mark.parametrize("coefficients", ["muon", "polar_express"])
def test_eager_peer_is_the_reference(size, coefficients):
    case = replace(TINY, rows=size[0], cols=size[1], dtype="fp64", coefficients=coefficients)
    x = _inputs(case).x.detach()
    expected = reference.newton_schulz(x, coefficients=coefficients, eps=peers.EPS)
    torch.testing.assert_close(peers.eager(x, case.triples), expected, rtol=1e-12, atol=1e-12)


def test_eager_peer_works_in_the_dtype_of_its_input():
    x = _inputs(TINY).x.detach()
    out = peers.eager(x, TINY.triples)
    wide = peers.eager(x.double(), TINY.triples)
    assert out.dtype == torch.bfloat16
    assert 3e-3 < float((out.double() - wide).norm() / wide.norm()) < 5e-2


def test_floor_allocates_nothing_and_needs_no_gradient():
    (floor,) = NEWTON_SCHULZ.others(TINY, ("matmul-floor",), "model")
    work = floor.build(TINY, _inputs(TINY))
    (first,), (second,) = work.forward(), work.forward()
    assert first.data_ptr() == second.data_ptr()
    assert not first.requires_grad
    assert not floor.checked
    assert floor.modes == ("fwd",)


@pytest.mark.parametrize("modes", [("fwd",), ("fwd", "bwd")], ids=str)
def test_compiled_peer_traces_whole_and_differentiates_twice(modes, monkeypatch):
    seen = []

    def quick(function, **options):
        seen.append(options)
        return compiler(function, backend="aot_eager", **options)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", quick)
    case = replace(TINY, modes=modes, peers=("eager", "compiled"))
    rows = _rows(case)
    assert seen == [{"dynamic": False, "fullgraph": True}]
    assert [rows["compiled", mode]["status"] for mode in modes] == ["ok"] * len(modes)


# ---- our rows -----------------------------------------------------------------------------------


def test_rows_say_which_backend_ran_and_why_others_did_not():
    rows = _rows(TINY)
    assert list(rows) == [
        *((name, "fwd") for name in (OURS, f"{OURS} [triton]", f"{OURS} [cuda]")),
        ("eager", "fwd"), ("matmul-floor", "fwd"),
        *((name, "bwd") for name in (OURS, f"{OURS} [triton]", f"{OURS} [cuda]")),
        ("eager", "bwd"),
    ]  # fmt: skip
    for mode in ("fwd", "bwd"):
        row = rows[OURS, mode]
        assert (row["status"], row["backend"], row["op"]) == ("ok", "eager", "newton_schulz")
        assert row["flops"] == TINY.flops(mode)
        assert row["ratio"]["peer"] == "eager"
        for backend in ("triton", "cuda"):
            row = rows[f"{OURS} [{backend}]", mode]
            assert (row["status"], row["reason"]) == (
                "unavailable", "the tensors are on the CPU",
            )  # fmt: skip


def test_a_backend_that_runs_has_a_row_of_its_own(monkeypatch):
    """One that takes the call is named by its row; one that does not is quoted."""

    def refusal(package, backend, shape, arch):
        return "too wide for it" if backend == "triton" else None

    real = dispatch.implementation
    monkeypatch.setattr(dispatch, "refusal", refusal)
    monkeypatch.setattr(dispatch, "implementation", lambda package, _: real(package, "eager"))
    rows = _rows(TINY)
    assert rows[f"{OURS} [cuda]", "fwd"]["status"] == "ok"
    assert rows[f"{OURS} [cuda]", "fwd"]["backend"] == "cuda"
    assert rows[f"{OURS} [triton]", "bwd"]["reason"] == "too wide for it"


def test_error_ratios_are_recorded_and_judged():
    targets = CASES["ns-converged-2048x64x256"].targets
    rows = _rows(replace(TINY, targets=targets))
    for mode in ("fwd", "bwd"):
        ratios = rows[OURS, mode]["gate"]["ratios"]
        assert set(ratios) == {"error", "orthogonality", "gradient error"}
        assert 0 < ratios["error"] < 0.5
        assert 0 < ratios["gradient error"] < 0.5
        assert set(rows["eager", mode]["gate"]["ratios"].values()) == {1.0}
    judged = {t["measure"]: t for mode in ("fwd", "bwd") for t in rows[OURS, mode]["targets"]}
    assert judged["error"]["ratio"] == rows[OURS, "fwd"]["gate"]["ratios"]["error"]
    assert judged["error"]["reached"] == "aim"
    assert judged["gradient error"]["reached"] == "floor"
    assert rows["matmul-floor", "fwd"]["gate"] is None


# ---- gate ---------------------------------------------------------------------------------------


def _spoiled(spoil, case=TINY):
    contender = NEWTON_SCHULZ.ours(case, ("auto",))[0]

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: (spoil(*right()),))

    return replace(contender, build=build)


def _noise(size):
    def spoil(out):
        source = torch.Generator().manual_seed(7)
        return out + size * out.detach().std() * torch.randn(out.shape, generator=source)

    return spoil


def test_gate_stands_at_a_fifth_above_the_error_of_eager():
    """Noise of about 1.0 and 1.5 times eager's error (1.5e-2 here), beside our own."""
    assert _check(_spoiled(_noise(0.012))).ok
    verdict = _check(_spoiled(_noise(0.022)))
    assert not verdict.ok
    assert verdict.failures[0].startswith("small out: error")
    assert 1.2 < verdict.ratios["error"] < 2


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda out: out * 1.03, "out"),
        (lambda out: out.mT.contiguous().view(out.shape), "out"),
        (lambda out: 1.1 * out - 0.1 * out.detach(), "d_x"),
        (lambda out: out.detach() + 0.0 * out, "d_x"),
    ],
    ids=["scaled", "transposed", "gradient-scaled", "gradient-lost"],
)
def test_wrong_implementation_fails(spoil, name):
    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert any(line.startswith(f"small {name}:") for line in verdict.failures)
    assert any(line.startswith(f"full size {name}:") for line in verdict.failures)


def _blank_one(place):
    """Unwritten memory that holds the right numbers by luck, in one matrix of the full stack."""

    def spoil(out):
        if out.shape[0] != TINY.batch:
            return out
        fresh = alloc.empty(out.shape, dtype=out.dtype, device=CPU)
        lucky = fresh if alloc._poisoned else out
        return torch.where(torch.arange(out.shape[0])[:, None, None] == place, lucky, out)

    return spoil


@pytest.mark.parametrize("place", range(TINY.batch))
def test_every_matrix_of_the_stack_is_seen_to_be_written(place):
    verdict = _check(_spoiled(_blank_one(place)))
    assert verdict.failures == ["ValueError: out: 1 of 12 matrices are not finite"]


@pytest.mark.parametrize("place", [0, TINY.batch - 1])
def test_first_and_last_matrix_are_compared(place):
    def spoil(out):
        here = torch.arange(out.shape[0])[:, None, None] == place
        return torch.where(here & (out.shape[0] == TINY.batch), 1.1 * out, out)

    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert all(line.startswith("full size ") for line in verdict.failures)


def test_orthogonality_is_that_of_the_shorter_side():
    case = replace(
        TINY, rows=24, cols=16, dtype="fp64", steps=12, coefficients=((1.875, -1.25, 0.375),)
    )
    inputs = _inputs(case)
    contender = NEWTON_SCHULZ.ours(case, ("auto",))[0]
    work = contender.build(case, inputs)
    got = {"out": work.forward()[0]}
    results = NEWTON_SCHULZ.whole(contender, case, inputs, work, got)
    assert results.got["orthogonality"].shape == (12, 16, 16)
    assert set(results.truth) == {"out", "orthogonality"}
    worst = (results.got["orthogonality"] - results.truth["orthogonality"]).abs().max()
    assert float(worst) < 1e-6


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp64"])
def test_every_dtype_passes_its_own_gate(dtype):
    case = TINY.in_dtype(dtype)
    for contender in NEWTON_SCHULZ.contenders(case, backends=("auto",)):
        if contender.checked:
            assert _check(contender).ok, contender.name


# ---- command ------------------------------------------------------------------------------------


def test_command_runs_the_family(capsys):
    arguments = ["newton_schulz", "--device", "cpu", "--cases", "cpu-ns-16x32x32"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "newton_schulz (eager)" in said
    assert "unavailable: the tensors are on the CPU" in said
