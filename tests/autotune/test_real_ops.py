"""The ops' own tuning files: every problem gives cases, and a sweep runs their kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastweights import ops
from fastweights.autotune import Device, cases, check, cli, space, sweep, tables
from fastweights.autotune.space import assume_device, choose
from fastweights.ops import dispatch
from fastweights.ops.atlas import tuning as atlas
from fastweights.ops.delta_rewrite import tuning as delta_rewrite
from fastweights.ops.gated_delta import tuning as gated_delta
from fastweights.ops.gated_delta_step import tuning as gated_delta_step
from fastweights.ops.newton_schulz import tuning as newton_schulz
from fastweights.ops.omega import tuning as omega
from fastweights.ops.omega_step import tuning as omega_step
from fastweights.ops.paged_cache_write import tuning as paged_cache_write
from fastweights.ops.polar_attention import tuning as polar
from fastweights.ops.polar_decode import tuning as polar_decode
from fastweights.ops.polynomial import tuning as polynomial
from fastweights.ops.short_conv import tuning as short_conv
from fastweights.ops.short_conv_step import tuning as short_conv_step

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TUNINGS = {
    "atlas": atlas,
    "delta_rewrite": delta_rewrite,
    "gated_delta": gated_delta,
    "gated_delta_step": gated_delta_step,
    "newton_schulz": newton_schulz,
    "omega": omega,
    "omega_step": omega_step,
    "paged_cache_write": paged_cache_write,
    "polar_attention": polar,
    "polar_decode": polar_decode,
    "polynomial": polynomial,
    "short_conv": short_conv,
    "short_conv_step": short_conv_step,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("name", TUNINGS)
def test_tuning_files_keep_the_protocol(name: str) -> None:
    tuning: Any = TUNINGS[name]
    names = [problem.name for problem in tuning.PROBLEMS]
    assert len(set(names)) == len(names)
    for problem in tuning.PROBLEMS:
        assert set(problem.dtypes) <= set(cases.DTYPES)
        first, second = problem.checks
        assert first != second
        for small in problem.checks:
            assert small.functions == problem.functions


@pytest.mark.parametrize("name", TUNINGS)
def test_spaces_bear_the_name_of_a_public_function(name: str) -> None:
    """By which `show` finds them."""
    for found in TUNINGS[name].SPACES:
        assert getattr(ops, found.op) in dispatch.public()
        assert found in cli.spaces_of(found.op)


RECORD = """
import json, sys, torch
from dataclasses import replace
from fastweights.autotune import Device, cases
from fastweights.autotune.space import assume_device

tuning = cases.tuning_of(sys.argv[1])
cpu, device = torch.device("cpu"), Device("sm_90", 232448, multiprocessors=132, name="nvidia-test")
found = {}
with assume_device(device):
    for problem in tuning.PROBLEMS:
        # The problem itself is large; its first check is of the same kind.
        small = replace(problem.checks[0], dtypes=problem.dtypes)
        for case in cases.collect([small], cpu):
            if case.name in found: continue
            calls = [case.call(small, cpu, seed=0)]
            configs = case.configs(device, "full")
            launched = [len(case.sources(config, calls)) for config in configs]
            found[case.name] = [case.space.name, len(configs), min(launched)]
print(json.dumps(list(found.values())))
"""


@pytest.mark.parametrize("name", TUNINGS)
def test_every_config_of_every_case_can_be_launched(name: str) -> None:
    """Launches are recorded on a machine without a GPU, as a sweep does to compile beforehand."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", RECORD, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    met = {space_name for space_name, _, _ in found}
    wanted = {x.name for x in TUNINGS[name].SPACES}
    from fastweights.ops import cuda_runtime

    if cuda_runtime.missing() is not None:
        wanted = {x for x in wanted if not x.endswith("/cuda")}
    assert met == wanted
    assert all(1 <= configs <= 24 and launched >= 1 for _, configs, launched in found)


@pytest.mark.parametrize("name", TUNINGS)
def test_checks_take_every_config_of_their_problem(name: str) -> None:
    """A sweep forces a config on the checks, too: one that they do not take would be rejected."""
    device = Device("sm_90", 232448, multiprocessors=132, name="nvidia-test")
    refused, asked = [], 0
    with assume_device(device), FakeTensorMode():
        for problem in TUNINGS[name].PROBLEMS:
            for case in cases.collect([problem], CPU):
                for small in problem.checks:
                    call = case.call(small, CPU, seed=0)
                    package, shape = dispatch.planned(problem.functions[0], **call.arguments)
                    spaces = dispatch.spaces(package, case.space.backend, shape, device)
                    if case.space not in spaces.values():
                        continue  # this check launches kernels of another space
                    key = case.space.bucket(shape)
                    for config in case.configs(device, "full"):
                        asked += 1
                        reason = case.space.fits(config, key, device)
                        if reason is not None:
                            refused.append(f"{case.label}, {small}: {config.name} {reason}")
    assert asked > 0
    assert not refused, "\n".join(refused[:20])


class Tiny:
    """A problem cut down to what the interpreter can do, with checks of its own size."""

    def __init__(self, problem: Any, *checks: Any) -> None:
        self.problem, self.checks = problem, checks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.problem, name)


def stack(batch: int, rows: int, cols: int, **changes: Any) -> Any:
    return newton_schulz.Problem("tiny", batch, rows, cols, dtypes=("fp32",), **changes)


def attention(tokens: int, **changes: Any) -> Any:
    return polar.Problem("tiny", 1, tokens, 2, 1, 16, dtypes=("fp32",), **changes)


def memory(tokens: int, **changes: Any) -> Any:
    return omega.Problem("tiny", 1, tokens, 1, 16, 3, 8, dtypes=("fp32",), judged=True, **changes)


def orthogonal(tokens: int, heads: int = 1) -> Any:
    return atlas.Problem("tiny", 1, tokens, heads, 16, 3, 8, dtypes=("fp32",), judged=True)


def products(function: str, tokens: int, width: int = 16) -> Any:
    values = 0 if function == polynomial.FEATURES else 16
    return polynomial.Problem("tiny", function, 1, tokens, 1, width, values, ("fp32",))


def step(rows: int, width: int, **changes: Any) -> Any:
    return omega_step.Problem(
        "tiny", rows, 1, width, width, 3, 4, dtypes=("fp32",), few=True, **changes
    )


def written(tokens: int, width: int) -> Any:
    return paged_cache_write.Problem("tiny", tokens, 2, width, 16, ("fp32",), few=True)


def decoded(keys: int, page_size: int, **changes: Any) -> Any:
    return polar_decode.Problem(
        "tiny", 2, 4, 2, keys, 16, page_size, dtypes=("fp32",), ragged=True, **changes
    )


def delta_rule(tokens: int, width: int) -> Any:
    return gated_delta.Problem("tiny", 1, tokens, 2, width, width, 2, dtypes=("fp32",))


def delta(rows: int, width: int) -> Any:
    return gated_delta_step.Problem("tiny", rows, 2, width, width, 2, dtypes=("fp32",), few=True)


def conv(tokens: int, channels: int, **changes: Any) -> Any:
    return short_conv.Problem("tiny", 1, tokens, channels, dtypes=("fp32",), **changes)


def conv_step(rows: int, channels: int, **changes: Any) -> Any:
    return short_conv_step.Problem("tiny", rows, channels, dtypes=("fp32",), few=True, **changes)


def rewrite(batch: int, tokens: int, width: int) -> Any:
    return delta_rewrite.Problem("tiny", batch, tokens, 17, width, 16, dtypes=("fp32",), few=True)


TINY = {
    "gated delta": Tiny(delta_rule(20, 16), delta_rule(17, 16), delta_rule(9, 13)),
    "gated delta step": Tiny(delta(3, 16), delta(5, 16), delta(4, 13)),
    "short_conv": Tiny(conv(20, 16), conv(17, 16), conv(9, 13, taps=4, silu=True, bias=True)),
    "short_conv step": Tiny(
        conv_step(3, 16), conv_step(5, 16), conv_step(4, 13, taps=4, silu=True, bias=True)
    ),
    "delta_rewrite": Tiny(rewrite(1, 4, 8), rewrite(2, 3, 8), rewrite(1, 4, 7)),
    "newton_schulz": Tiny(stack(3, 16, 16), stack(2, 13, 15), stack(1, 15, 9)),
    "factor": Tiny(stack(2, 16, 16, factor=True), stack(2, 17, 15, factor=True)),
    "polar": Tiny(attention(20), attention(17), attention(7)),
    "omega": Tiny(memory(9), memory(11, momentum=True), memory(5, momentum=True)),
    "atlas": Tiny(orthogonal(9), orthogonal(11), orthogonal(5, 2)),
    "omega_step": Tiny(step(2, 16), step(5, 16), step(3, 16)),
    "omega_step with momentum": Tiny(*[step(n, 16, momentum=True) for n in (2, 5, 3)]),
    "cache write": Tiny(*[written(n, 32) for n in (9, 5, 7)]),
    "decode": Tiny(decoded(70, 16), decoded(40, 16, splits=2), decoded(33, 64, window=9)),
    "softmax": Tiny(attention(20, polar=False), attention(17, polar=False)),
    **{
        name: Tiny(*(products(name, *size) for size in ((20,), (17,), (9, 11))))
        for name in polynomial.FUNCTIONS
    },
}


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels in Triton's interpreter, without a GPU")
@pytest.mark.parametrize("name", TINY)
def test_a_sweep_runs_the_ops_own_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path))
    monkeypatch.setattr(check, "REPEATS", 1)
    monkeypatch.setattr(sweep.Options, "seconds", 0.0)
    monkeypatch.setattr(cases, "QUICK", 2)
    space.reload()
    device = Device("cpu", shared_bytes=1 << 30, name="test-cpu")
    out = tables.path_of(device.name)
    with assume_device(device):
        found = cases.collect([TINY[name]], CPU)
        forward_only = any(word in name for word in ("step", "write", "decode"))
        passes = {"fwd"} if forward_only else {"fwd", "bwd"}
        if name == "delta_rewrite":
            passes = {"fwd", "fwd_read", "bwd", "bwd_read"}
        if name == "gated delta":  # a space for each kernel
            passes = {space.pass_ for space in gated_delta.SPACES}
        assert {case.space.pass_ for case in found} == passes
        how = sweep.Options(CPU, out, tmp_path / "log", effort="quick")
        outcome = sweep.sweep(found, how)
        assert outcome.rejected == []
        assert outcome.failed == []
        assert len(outcome.rows) == len(passes)
        for case, row in zip(found, outcome.rows, strict=True):
            assert row.error <= 1
            assert (row.error > 0) == (name != "cache write")  # which computes nothing
            chosen = choose(case.space, case.key, device)
            (written,) = (x for x in tables.load(out).rows if x.pass_ == case.space.pass_)
            assert chosen.name == written.config
    space.reload()


def test_plain_torch_in_fp16_is_a_fair_yardstick() -> None:
    """It computes the same thing, and less exactly than the reference in fp32 does."""
    x = torch.randn(4, 24, 40)
    exact = newton_schulz.reference.newton_schulz(x.double())
    assert torch.equal(newton_schulz.stored_in_fp16(x), newton_schulz.reference.newton_schulz(x))
    for shaped in (x, x.mT):
        wanted = exact if shaped is x else exact.mT
        half = newton_schulz.stored_in_fp16(shaped.half()).double()
        off = (half - wanted).norm() / wanted.norm()
        assert 1e-5 < off < 5e-3


def test_sizes_make_problems() -> None:
    made = polar.problem(T=64, D=32, B=2, Hq=4, Hk=2, window=8, function="softmax_attention")
    assert (made.name, made.polar) == ("B2-T64-H4-D32-softmax-window8", False)
    assert made.inputs(torch.float32, CPU, 0)["k"].shape == (2, 64, 2, 32)
    assert "null_base" in replace(made, polar=True).inputs(torch.float32, CPU, 0)
    made = omega.problem(T=64, D=32, H=2, chunk_size=16, momentum=1)
    assert made.name == "B1-T64-H2-D32-window4-chunk16-momentum"
    assert made.inputs(torch.float32, CPU, 0)["momentum"].shape == (1, 64, 2)
    made = atlas.problem(T=64, D=32, H=2, chunk_size=16)
    assert made.name == "B1-T64-H2-D32-window4-chunk16"
    assert made.inputs(torch.float32, CPU, 0)["output_step"].shape == (1, 64, 2)
    read = polynomial.problem(T=9, D=4, B=2, H=3, V=5)
    assert read.name == "polynomial_read-B2-T9-H3-D4-V5"
    assert read.inputs(torch.float32, CPU, 0)["state"].shape == (2, 3, 14, 5)
    made = omega_step.problem(N=3, D=32, Dv=16, H=2, chunk_size=16, momentum=1)
    assert made.name == "N3-H2-D32-V16-window4-chunk16-momentum"
    given = made.inputs(torch.float32, CPU, 0)
    assert given["v"].shape == (3, 2, 16)
    assert given["cache"].filled.tolist() == [1, 2, 3]
    made = polar_decode.problem(B=3, T=40, D=32, Hq=4, Hk=2, page=16, window=9)
    assert made.name == "B3-T40-H4-2-D32-page16-window9"
    given = made.inputs(torch.float32, CPU, 0)
    assert given["k_cache"].shape == (9, 16, 2, 32)
    assert given["context_lens"].tolist() == [40, 40, 40]
    assert polar_decode.problem(B=1, T=5).heads_k == 16
    made = paged_cache_write.problem(N=9, D=32, H=2, page=16)
    assert made.name == "N9-H2-D32-page16"
    assert made.inputs(torch.float32, CPU, 0)["v_cache"].shape == (2, 16, 2, 32)
    made = gated_delta.problem(T=9, D=32, Dv=16, H=4, groups=2)
    assert made.name == "B1-T9-H4-D32-V16-groups2"
    given = made.inputs(torch.float32, CPU, 0)
    assert [given[name].shape[2:] for name in "qkv"] == [(2, 32), (2, 32), (4, 16)]
    made = gated_delta_step.problem(N=3, D=32, Dv=16, H=4, groups=2)
    assert made.name == "N3-H4-D32-V16-groups2"
    given = made.inputs(torch.float32, CPU, 0)
    assert [given[name].shape[1:] for name in "qkv"] == [(2, 32), (2, 32), (4, 16)]
    made = short_conv.problem(T=9, D=8, B=2, K=4, gates="i", silu=1, bias=1)
    assert made.name == "B2-T9-D8-K4-i-silu-bias"
    assert set(made.inputs(torch.float32, CPU, 0)) == {"x", "weight", "bias", "gate_in"}
    made = short_conv_step.problem(N=3, D=8, residual=1)
    assert made.name == "N3-D8-K3-io-residual"
    assert made.inputs(torch.float32, CPU, 0)["state_pool"].shape == (3, 2, 8)
    gram = newton_schulz.problem(m=8, B=3, function="gram_newton_schulz_factor")
    assert gram.inputs(torch.float32, CPU, 0)["gram"].shape == (3, 8, 8)
