"""The family of paged decoding in the benchmark on a CPU: counts, peers, gate, rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.bench import cli, families, gate, runner
from fastweights.bench.family import Unavailable
from fastweights.bench.polar_decode import POLAR_DECODE, peers
from fastweights.bench.polar_decode.cases import OURS
from fastweights.ops import alloc

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(
    CASES["cpu-decode-b4-s512"], name="tiny", batch=6, keys=75, width=16, page_size=16, dtype="bf16"
)
KINDS = {
    "plain": TINY,
    "window": replace(TINY, window=20, heads_k=8, peers=("copy",)),
    "expanded": replace(TINY, expanded=True),
}


@pytest.fixture(autouse=True)
def _as_the_command_runs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it Triton would run here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(case, seed=0):
    return POLAR_DECODE.inputs(case, torch.Generator().manual_seed(seed))


def _check(contender, seed=0):
    inputs = _inputs(contender.case, seed)
    work = contender.build(contender.case, inputs)
    return gate.check(POLAR_DECODE, contender, inputs, work, seed + 1)


# ---- cases --------------------------------------------------------------------------------------


def test_headline_is_what_was_asked_for():
    """Grouped heads at many sequences and at one long one, held to the copy's rate."""
    headline = [c for c in POLAR_DECODE.cases if c.device == "cuda" and "headline" in c.suites]
    sizes = {(c.batch, c.heads_q, c.heads_k, c.keys) for c in headline}
    assert sizes == {(64, 16, 4, 8192), (1, 8, 2, 65536), (1, 16, 16, 512), (32, 32, 8, 4096)}
    assert all((c.dtype, c.width, c.modes) == ("bf16", 128, ("fwd",)) for c in headline)
    held = {c.name: c.targets for c in headline if c.targets}
    assert set(held) == {"decode-b64-s8192", "decode-b1-s65536"}
    of_copy, of_expanded = held["decode-b64-s8192"]
    assert (of_copy.contender, of_copy.against, of_copy.floor) == (OURS, "copy", 0.8)
    assert (of_expanded.against, of_expanded.floor) == (f"{OURS}, expanded", 3.0)
    (alone,) = held["decode-b1-s65536"]
    assert (alone.against, alone.floor, alone.aim) == ("copy", 0.5, 0.8)
    page_sizes = {c.page_size for c in POLAR_DECODE.cases if c.device == "cuda"}
    assert page_sizes == {16, 64, 256}


def test_bytes_of_a_call():
    """Keys and values by hand, and what is beside them: of a window, one page in ten or so."""
    case = CASES["decode-b1-s65536"]
    caches = 2 * 65536 * 2 * 128 * 2
    row = 2 * 8 * 128 * 2 + 8 * 4
    assert case.bytes("fwd") == caches + 4 * 1024 + 4 + row + 8 * (256 + 16)
    assert case.bytes("fwd") < 1.001 * caches
    case = CASES["decode-b64-s8192-window"]
    caches = 64 * 2 * 1024 * 4 * 128 * 2
    assert caches < case.bytes("fwd") < 1.01 * caches
    assert replace(TINY, window=20).seen == 20
    assert TINY.with_expanded_caches().bytes("fwd") > 3.5 * TINY.bytes("fwd")


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_torch_counts_the_flops_of_the_case(case):
    contender, *_ = POLAR_DECODE.ours(case, ("auto",))
    work = contender.build(case, _inputs(case))
    with FlopCounterMode(display=False) as counter:
        work.forward()
    assert counter.get_total_flops() == case.flops("fwd")


@pytest.mark.parametrize("case", POLAR_DECODE.cases, ids=lambda case: case.name)
def test_small_case_keeps_the_rules(case):
    small = case.small()
    kept = ("width", "page_size", "dtype", "device")
    assert all(getattr(small, name) == getattr(case, name) for name in kept)
    assert small.heads_q * case.heads_k == small.heads_k * case.heads_q
    assert (small.window is None) == (case.window is None)
    assert small.batch * small.keys <= 1000
    if case.window is not None:
        assert small.window < small.keys


def test_sequences_are_full_and_pages_in_any_order():
    inputs = _inputs(TINY)
    given = inputs.given
    assert given["context_lens"].tolist() == [75] * 6
    pages = given["block_tables"].flatten()
    assert sorted(pages.tolist()) == list(range(30)) != pages.tolist()
    k, v = inputs.dense()
    assert k.shape == v.shape == (6, 75, 2, 16)
    assert torch.equal(k[4, 33], given["k_cache"][int(given["block_tables"][4, 2]), 1])


# ---- rows and the gate --------------------------------------------------------------------------


def test_rows_of_the_family():
    options = runner.Options(device=CPU, seed=3, seconds=0.01)
    case = replace(KINDS["expanded"], peers=("copy", "sdpa-cudnn", "sdpa", "eager"))
    rows = runner.run_case(case, POLAR_DECODE.contenders(case), options)
    found = {row["contender"]: row for row in rows}
    assert list(found) == [
        OURS, f"{OURS}, expanded", "copy", "sdpa-cudnn", "sdpa", "eager"
    ]  # fmt: skip
    cudnn = found.pop("sdpa-cudnn")
    assert (cudnn["status"], cudnn["reason"]) == ("unavailable", "needs a GPU")
    assert {row["status"] for row in found.values()} == {"ok"}
    assert found[OURS]["ratio"]["peer"] == "copy"
    copy = found["copy"]
    assert copy["gbps"] * copy["ms"] == pytest.approx(case.bytes("fwd") / 1e6)
    (first, second) = POLAR_DECODE.ours(TINY, ("eager", "triton"))
    assert (first.name, second.name) == (OURS, f"{OURS} [triton]")
    with pytest.raises(Unavailable, match="the tensors are on the CPU"):
        second.build(TINY, _inputs(TINY))


def test_a_copy_moves_as_many_bytes():
    (copy,) = POLAR_DECODE.others(TINY, ("copy",), "model")
    (y,) = copy.build(TINY, _inputs(TINY)).forward()
    assert 0 <= TINY.bytes("fwd") - 2 * y.nbytes < 8
    assert not copy.checked


@pytest.mark.parametrize("layout", ["model", "natural"])
def test_sdpa_is_checked_against_softmax_attention(layout):
    (sdpa,) = POLAR_DECODE.others(TINY, ("sdpa",), layout)
    verdict = _check(sdpa)
    assert verdict.ok, verdict.failures
    wrong = replace(sdpa, function=TINY.op)
    assert not _check(wrong).ok


def test_why_sdpa_cannot_run():
    assert peers.available("sdpa", TINY) is None
    assert "sliding window" in peers.available("sdpa", KINDS["window"])
    gpu = CASES["decode-b64-s8192"]
    assert peers.available("sdpa-cudnn", gpu) is None
    assert "16-bit" in peers.available("sdpa-flash", gpu.in_dtype("fp32"))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_every_dtype_passes_its_own_gate(case, dtype):
    for contender in POLAR_DECODE.ours(case.in_dtype(dtype), ("auto",)):
        verdict = _check(contender)
        assert verdict.ok, verdict.failures


def _spoiled(spoil):
    (contender,) = POLAR_DECODE.ours(TINY, ("auto",))

    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: spoil(*right()))

    return replace(contender, build=build)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda direction, count: (direction * 1.03, count), "out"),
        (lambda direction, count: (direction, count + 0.01), "count"),
    ],
)
def test_wrong_implementation_fails(spoil, name):
    verdict = _check(_spoiled(spoil))
    assert not verdict.ok
    assert any(line.startswith(f"small {name}:") for line in verdict.failures)
    assert any(line.startswith(f"full size {name}:") for line in verdict.failures)


def test_every_number_is_seen_to_be_written():
    """Unwritten memory that holds the right numbers by luck, where nothing is compared."""

    def spoil(direction, count):
        fresh = alloc.empty(count.shape, dtype=count.dtype, device=CPU)
        lucky = fresh if alloc._poisoned else count
        one = torch.zeros(count.shape, dtype=torch.bool)
        one[2, 3] = count.shape[0] == TINY.batch  # sequences 0, 1, 3 and 5 are compared
        return direction, torch.where(one, lucky, count)

    verdict = _check(_spoiled(spoil))
    assert verdict.failures == ["ValueError: count: 1 of 48 numbers are not finite"]


def test_command_runs_the_family(capsys):
    arguments = ["polar_decode", "--device", "cpu", "--cases", "cpu-decode-window"]
    assert cli.main(["bench", *arguments, "--seconds", "0.01", "--seed", "3"]) == 0
    assert "polar_decode (eager)" in capsys.readouterr().out
