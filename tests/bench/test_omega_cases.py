"""The Omega family of the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from fastweights import reference
from fastweights.bench import cli, families, gate, runner
from fastweights.bench.family import Unavailable
from fastweights.bench.omega import OMEGA, ours, peers
from fastweights.bench.omega.cases import OURS
from fastweights.ops import alloc
from fastweights.ops import flops as counts

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-omega-d32"], name="tiny", batch=2, tokens=80, heads=3, width=16, chunk_size=16,
    dtype="bf16",
)  # fmt: skip
KINDS = [TINY, replace(TINY, momentum=True), replace(TINY, l2norm=True, chunk_size=32)]
NAMES = ["plain", "momentum", "l2norm"]
SYMMETRIC = replace(TINY, symmetric=True, width=6, modes=("fwd",))

# Asked for: (B, H, D, chunk_size, momentum), T = 8192, bf16, a window of 4.
TABLE = {
    "omega-d64": (4, 16, 64, 64, False),
    "omega-d128": (4, 16, 128, 64, False),
    "omega-d128-one-row": (1, 16, 128, 64, False),
    "omega-d64-chunk16": (4, 16, 64, 16, False),
    "omega-d64-momentum": (4, 16, 64, 64, True),
}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return OMEGA.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(OMEGA, contender, inputs, work, seed + 1)


def _rows(case, **options):
    found = OMEGA.contenders(case)
    chosen = runner.Options(device=CPU, seed=3, seconds=0.01, **options)
    return {(row["contender"], row["mode"]): row for row in runner.run_case(case, found, chosen)}


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_the_table():
    headline = [c for c in OMEGA.cases if c.device == "cuda" and "headline" in c.suites]
    assert {
        c.name: (c.batch, c.heads, c.width, c.chunk_size, c.momentum) for c in headline
    } == TABLE  # fmt: skip
    for case in headline:
        assert (case.tokens, case.dtype, case.window) == (8192, "bf16", 4)
        assert case.modes == ("fwd", "bwd")
        assert {"eager", "compiled"} <= set(case.peers)
        assert ("fla" in case.peers) != case.momentum


def test_case_counts_useful_flops_and_compulsory_bytes():
    """The formula of a chunk as it was issued: [2b + 4n]·D·Dv + 4bn·d, n = b + c − 1."""
    case = CASES["omega-d64"]
    b, n, d = 64, 67, 64
    chunk = (2 * b + 4 * n) * d * d + 4 * b * n * d
    assert case.flops("fwd") == 4 * 16 * 128 * chunk
    more = CASES["omega-d64-momentum"].flops("fwd") - case.flops("fwd")
    assert more == 4 * 16 * 128 * (2 * b + 2 * n) * d * d
    assert case.flops("bwd") == 4 * 16 * counts.omega_backward(8192, b, 4, d, d, momentum=False)
    rows = 4 * 8192 * 16
    assert case.bytes("fwd") == rows * (4 * 64 * 2 + 4 * 6)
    assert case.bytes("bwd") == rows * (7 * 64 * 2 + 2 * 4 * 6)
    assert CASES["omega-d64-momentum"].bytes("fwd") == rows * (4 * 64 * 2 + 4 * 7)


@pytest.mark.parametrize("case", KINDS, ids=NAMES)
def test_bytes_are_those_of_the_tensors(case):
    inputs = _inputs(case)
    read = sum(x.nbytes for x in inputs.leaves.values())
    assert case.bytes("fwd") == read + inputs.d_out.nbytes
    assert case.bytes("bwd") == 2 * read + inputs.d_out.nbytes


@pytest.mark.parametrize("case", KINDS, ids=NAMES)
def test_torch_counts_the_flops_of_the_case(case):
    inputs = _inputs(case)
    work = ours.call(case, inputs, "auto")
    with FlopCounterMode(display=False) as forward:
        outputs = work.forward()
    with FlopCounterMode(display=False) as backward:
        work.backward(outputs)
    assert forward.get_total_flops() == case.flops("fwd")
    assert backward.get_total_flops() == case.flops("bwd")


@pytest.mark.parametrize("case", OMEGA.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules_and_a_ragged_chunk(case):
    small = case.small()
    rules = ("width", "window", "chunk_size", "momentum", "l2norm", "symmetric", "dtype")
    assert all(getattr(small, name) == getattr(case, name) for name in rules)
    assert small.tokens % case.chunk_size
    assert small.tokens > 2 * case.chunk_size
    assert small.batch * small.heads * small.tokens <= 400


@pytest.mark.parametrize("case", KINDS, ids=NAMES)
def test_inputs_keep_a_memory_bounded(case):
    inputs = _inputs(replace(case, tokens=512, dtype="fp32"))
    assert all(x.requires_grad for x in inputs.leaves.values())
    norms = inputs.leaves["k"].norm(dim=-1)
    assert bool(((norms - 1).abs() < 1e-5).all()) == (not case.l2norm)
    given = ours.operands(case, inputs.leaves)
    assert (given["k"].norm(dim=-1) - 1).abs().max() < 1e-5
    (y,) = ours.call(case, inputs, "eager").forward()
    assert y.square().mean() < 1


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [80, 75, 7])
@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_chunks_in_one_graph_are_the_reference(window, momentum, tokens):
    case = replace(TINY, dtype="fp64", window=window, momentum=momentum, tokens=tokens)
    inputs = _inputs(case)
    calls = (peers.chunked, lambda **given: reference.omega_memory(**given)[0])
    found = []
    for call in calls:
        y = call(**inputs.leaves, **ours.rules(case))
        found.append((y, *torch.autograd.grad(y, tuple(inputs.leaves.values()), inputs.d_out)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_chunks_in_one_graph_work_in_the_dtype_of_their_keys():
    """Errors of the size that the literal loops have in that dtype."""
    inputs, errors = _inputs(TINY), []
    wide = {name: x.double() for name, x in inputs.leaves.items()}
    truth = reference.omega_memory(**wide, **ours.rules(TINY))[0].detach()
    for call in (peers.chunked, lambda **given: reference.omega_memory(**given)[0]):
        y = call(**inputs.leaves, **ours.rules(TINY)).detach()
        assert y.dtype == torch.bfloat16
        errors.append(float((y.double() - truth).norm() / truth.norm()))
    assert 1e-3 < errors[0] < 1e-2
    assert 0.5 < errors[0] / errors[1] < 2


@pytest.mark.parametrize("modes", [("fwd",), ("fwd", "bwd")], ids=str)
def test_compiled_peer_traces_whole_and_differentiates_twice(modes, monkeypatch):
    seen = []

    def quick(function, **options):
        seen.append((function, options))
        return compiler(function, backend="aot_eager", **options)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", quick)
    rows = _rows(replace(TINY, modes=modes, momentum=True, peers=("eager", "compiled")))
    assert seen == [(peers.chunked, {"dynamic": False, "fullgraph": True})]
    assert [rows["compiled", mode]["status"] for mode in modes] == ["ok"] * len(modes)


def test_fla_is_optional(monkeypatch):
    """Named as unavailable where it is not installed, and called as it has to be where it is."""
    case = replace(CASES["omega-d64"], batch=1, tokens=128)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peers.available("fla", case) == "fla is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert peers.available("fla", case) is None
    assert peers.available("fla", replace(case, dtype="fp32")) == "16-bit dtypes only"
    assert peers.available("fla", replace(case, device="cpu")) == "needs a GPU"
    (contender,) = OMEGA.others(replace(TINY, peers=("fla",)), ("fla",), "model")
    assert contender.reason == "needs a GPU"
    rows = _rows(replace(TINY, peers=("eager", "fla")))
    assert {rows["fla", mode]["status"] for mode in ("fwd", "bwd")} == {"unavailable"}
    assert rows["fla", "fwd"]["reason"] == "needs a GPU"
    assert rows[OURS, "fwd"]["ratio"]["peer"] == "eager"


def _gated_delta_rule(q, k, v, g, beta, *, scale, use_qk_l2norm_in_kernel):
    """The gated delta rule token by token: the error is taken at the decayed state."""
    if use_qk_l2norm_in_kernel:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    reads = []
    for t in range(q.shape[2]):
        state = g[:, t, :, None, None].exp() * state
        key = k[:, :, t, :, None]
        error = beta[:, t, :, None] * (v[:, :, t] - (key * state).sum(-2))
        state = state + key * error[:, :, None]
        reads.append(scale * (q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(reads, 1).bfloat16(), None


@pytest.fixture
def fla(monkeypatch):
    """A package of that name with that function."""
    package = types.ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = _gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(peers, "available", lambda name, case: None)
    return package


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.usefixtures("fla")
def test_fla_is_held_to_its_own_rule(l2norm):
    case = replace(TINY, peers=("eager", "fla"), l2norm=l2norm)
    rows = _rows(case)
    for mode in ("fwd", "bwd"):
        assert rows["fla", mode]["status"] == "ok", rows["fla", mode]["reason"]
        assert rows["fla", mode]["flops"] == case.flops(mode)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: {"scale": 0.25},
        lambda given: {"g": 0 * given["g"]},
        lambda given: {"beta": given["beta"] / 2},
        lambda given: {"k": given["k"].flip(2)},
    ],
    ids=["scale", "decay", "beta", "heads"],
)
def test_another_rule_than_fla_is_wrong(fla, change):
    def other(q, k, v, g, beta, **rest):
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | rest
        return _gated_delta_rule(**given | change(given))

    fla.chunk_gated_delta_rule = other
    rows = _rows(replace(TINY, peers=("fla",)))
    assert rows["fla", "fwd"]["status"] == "wrong"


@pytest.mark.parametrize(
    ("capability", "version", "refuses"),
    [
        ((9, 0), "3.6.0", True), ((9, 0), "3.4.0+git1", True), ((9, 0), "3.7.0", True),
        ((9, 0), "3.7.1", False), ((9, 0), "3.3.1", False), ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)  # fmt: skip
def test_fla_has_no_backward_on_hopper_with_some_tritons(capability, version, refuses, monkeypatch):
    triton = types.ModuleType("triton")
    triton.__version__ = version
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    (contender,) = OMEGA.others(CASES["omega-d64"], ("fla",), "model")
    assert contender.modes == (("fwd",) if refuses else ("fwd", "bwd", "memory"))


# ---- symmetric features -------------------------------------------------------------------------


def test_a_case_of_symmetric_features_counts_what_was_issued():
    """[2b + 4n]·D·Dv + 4bn·d a chunk, D = 2,144 of 64; its rate is held to a product's."""
    case = CASES["omega-d64-symmetric"]
    b, n, d = 64, 67, 64
    assert case.flops("fwd") == 4 * 16 * 128 * ((2 * b + 4 * n) * 2144 * d + 4 * b * n * d)
    assert (case.batch, case.tokens, case.heads, case.modes) == (4, 8192, 16, ("fwd",))
    (target,) = case.targets
    assert (target.against, target.measure) == ("matmul", "rate")
    assert (target.floor, target.good, target.aim) == (0.18, 0.25, 0.31)
    (matmul,) = OMEGA.others(case, ("matmul",), "model")
    assert matmul.case.flops("fwd") == 2 * 8192**3
    assert not matmul.checked


def test_rows_of_symmetric_features():
    case = replace(SYMMETRIC, peers=("matmul", "eager"))
    found = OMEGA.contenders(case)
    found = [replace(c, case=replace(c.case, side=64)) if c.name == "matmul" else c for c in found]
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    rows = {row["contender"]: row for row in runner.run_case(case, found, options)}
    assert {row["mode"] for row in rows.values()} == {"fwd"}
    assert all(row["status"] == "ok" for row in rows.values()), rows
    assert rows["matmul"]["flops"] == 2 * 64**3
    assert rows[OURS]["flops"] == case.flops("fwd")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_symmetric_features_pass_the_gate_and_spoiled_ones_fail(dtype):
    case = SYMMETRIC.in_dtype(dtype)
    assert _check(OMEGA.ours(case, ("auto",))[0]).ok
    verdict = _check(_spoiled(lambda y: y * 1.03, case))
    assert [line.partition(":")[0] for line in verdict.failures] == ["small out", "full size out"]


# ---- our rows and the gate ----------------------------------------------------------------------


def test_rows_of_the_family():
    rows = _rows(replace(TINY, peers=("eager",)))
    assert list(rows) == [(name, mode) for mode in ("fwd", "bwd") for name in (OURS, "eager")]
    for mode in ("fwd", "bwd"):
        row = rows[OURS, mode]
        assert (row["status"], row["backend"], row["op"]) == ("ok", "eager", "omega")
        assert row["sizes"]["chunk_size"] == 16
        assert row["ratio"]["peer"] == "eager"
    (first, second) = OMEGA.ours(TINY, ("eager", "triton"))
    assert (first.name, second.name) == (OURS, f"{OURS} [triton]")
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(TINY, _inputs(TINY))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", KINDS, ids=NAMES)
def test_every_dtype_passes_its_own_gate(case, dtype):
    case = replace(case.in_dtype(dtype), peers=("eager",))
    for contender in OMEGA.contenders(case):
        verdict = _check(contender)
        assert verdict.ok, (contender.name, verdict.failures)


def _spoiled(spoil, case=TINY):
    contender = OMEGA.ours(case, ("auto",))[0]

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: (spoil(*right()),))

    return replace(contender, build=build)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda y: y * 1.03, "out"),
        (lambda y: torch.cat((torch.zeros_like(y[:, :1]), y[:, :-1]), 1), "out"),
        (lambda y: 1.1 * y - 0.1 * y.detach(), "d_decay"),
        (lambda y: y.detach() + 0.0 * y, "d_k"),
    ],
    ids=["scaled", "read-before", "gradient-scaled", "gradient-lost"],
)
def test_wrong_implementation_fails(spoil, name):
    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert any(line.startswith(f"small {name}:") for line in verdict.failures)
    assert any(line.startswith(f"full size {name}:") for line in verdict.failures)


def test_the_last_heads_of_the_last_row_are_compared():
    def spoil(y):
        wrong = torch.zeros(y.shape[0], 1, y.shape[2], 1, dtype=torch.bool)
        wrong[-1, :, -1] = y.shape[2] == TINY.heads
        return torch.where(wrong, 1.1 * y, y)

    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert all(line.startswith("full size ") for line in verdict.failures)


def test_every_number_is_seen_to_be_written():
    """Unwritten memory that holds the right numbers by luck, where nothing is compared."""

    def spoil(y):
        if y.shape[2] != TINY.heads:
            return y
        fresh = alloc.empty(y.shape, dtype=y.dtype, device=CPU)
        lucky = fresh if alloc._poisoned else y
        first = torch.zeros(y.shape, dtype=torch.bool)
        first[0, 5, 0, 3] = True
        return torch.where(first, lucky, y)

    verdict = _check(_spoiled(spoil))
    assert verdict.failures == [f"ValueError: out: 1 of {2 * 80 * 3 * 16} numbers are not finite"]


def test_command_runs_the_family(capsys):
    arguments = ["omega", "--device", "cpu", "--cases", "cpu-omega-d32"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "omega_memory (eager)" in capsys.readouterr().out
