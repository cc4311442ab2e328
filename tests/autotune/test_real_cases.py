"""What compile reports of the ops cover: fewer variants of a config, never fewer configs."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.autotune.compile import CompileCase, CudaSource, target_device
from fastweights.autotune.space import assume_device
from fastweights.ops.newton_schulz import tuning as newton_schulz
from fastweights.ops.omega import tuning as omega
from fastweights.ops.polar_attention import tuning as polar
from fastweights.ops.polar_attention.triton_spaces import block_d
from fastweights.ops.polynomial import tuning as polynomial

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("sm_80", "sm_90")

# Launches are recorded of kernels as the compiler sees them, which the interpreter replaces.
CASES = """
import pickle, sys
from fastweights.autotune.cases import tuning_of
cases = {
    (op, target, quick): tuning_of(op).compile_cases(target, quick)
    for op in ("newton_schulz", "omega", "polar_attention", "polynomial")
    for target in sys.argv[2:]
    for quick in (False, True)
}
pickle.dump(cases, open(sys.argv[1], "wb"))
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, bool], Any]:
    """Cases by op, target, and whether they are the quick ones."""
    path = tmp_path_factory.mktemp("cases") / "cases"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", CASES, str(path), *TARGETS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["newton_schulz", "omega", "polar_attention", "polynomial"])
def test_the_quick_cases_are_some_of_all(cases: Any, op: str, target: str) -> None:
    quick, every = (
        {(case.config.name, repr(case.source)) for case in cases[op, target, short]}
        for short in (True, False)
    )
    assert quick < every


def attention_variant(case: CompileCase) -> tuple[int, int]:
    """Bytes of an element, and width of the tile."""
    constants = case.source.constexprs
    width = constants.get("BLOCK_D") or constants["CHUNK"] * constants["CHUNKS"]
    return 2 if case.source.half_precision else 4, width


@pytest.mark.parametrize("target", TARGETS)
def test_every_attention_config_is_compiled_in_the_widest_tile(cases: Any, target: str) -> None:
    """And default ones at every width."""
    device = target_device(target)
    served = defaultdict(set)
    defaults = set()
    sizes = [(torch.bfloat16, width) for width in polar.HALF_WIDTHS]
    sizes += [(torch.float32, width) for width in polar.FP32_WIDTHS]
    with assume_device(device):
        for (dtype, width), space, null_value in itertools.product(
            sizes, (polar.SPACE_FWD, polar.SPACE_BWD), (True, False)
        ):
            shape = replace(polar._compile_shape(dtype, width), null_value=null_value)
            key = space.bucket(shape)
            for config in space.fitting(key, device):
                tile = width if config.get("HOPPER") else block_d(width)
                served[space.pass_, config.name, dtype.itemsize].add(tile)
                narrow = dtype == torch.float32 and width == 64
                if null_value and not narrow and config == space.default(key, device):
                    defaults.add((space.pass_, config.name, dtype.itemsize, tile))
    names = ("attention_fwd", "attention_bwd_dkdv")
    found = defaultdict(set)
    for case in cases["polar_attention", target, False]:
        if case.source.name in names:
            size, tile = attention_variant(case)
            found[case.pass_, case.config.name, size].add(tile)
    assert found.keys() == served.keys()
    for config, tiles in found.items():
        assert tiles <= served[config]
        # Of the two widths with tiles of 256 the narrower one is the heavier.
        if config[2] == 2:
            assert max(map(block_d, tiles)) == max(map(block_d, served[config]))
    assert {(*config, tile) for config, tiles in found.items() for tile in tiles} >= defaults
    # The single-pass form serves no null value: it is compiled for the first rule without one.
    assert any("single1" in name for _, name, _ in found)


def flags(case: CompileCase) -> tuple[bool, ...]:
    constants = case.source.constexprs
    return tuple(constants[name] for name in ("POLAR", "CAUSAL", "WINDOW", "PACKED"))


def test_default_attention_configs_are_compiled_for_the_rules_that_differ_most(cases: Any) -> None:
    dense, most = (True, True, False, False), (True, True, True, True)
    softmax, whole = (False, True, False, False), (True, False, False, False)
    by_kernel = defaultdict(set)
    for case in cases["polar_attention", "sm_90", False]:
        if case.source.name in ("attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq"):
            by_kernel[(case.source.name, *attention_variant(case))].add(flags(case))
    assert {(size, width) for _, size, width in by_kernel} >= {(2, 64), (2, 192), (4, 128)}
    for (_, size, width), found in by_kernel.items():
        if size == 4:
            assert found == {most if width == 128 else dense}
        elif width > 64:  # the single-pass form has another first rule
            assert found - {softmax} == {dense, most}
        else:
            assert found == {dense, most, softmax, whole}


def test_kernels_of_two_widths_in_one_tile_are_compiled_once(cases: Any) -> None:
    widths = defaultdict(set)
    for case in cases["polar_attention", "sm_90", False]:
        if "BLOCK_D" in case.source.constexprs:
            widths[attention_variant(case)].add(case.source.constexprs["WIDTH"])
    # The narrower of two: its columns are masked.
    assert widths == {
        (2, 64): {64},
        (2, 128): {128},
        (2, 256): {192},
        (4, 128): {128},
        (4, 64): {64},
    }


def test_every_newton_schulz_config_is_compiled(cases: Any) -> None:
    found = {
        (case.op, case.pass_, case.config.name) for case in cases["newton_schulz", "sm_90", False]
    }
    device = target_device("sm_90")
    wanted = set()
    for space in newton_schulz.SPACES:
        if space.backend == "cuda" and newton_schulz.cuda_runtime.missing() is not None:
            continue
        for config in space.configs:
            key = space_key(space, config)
            if space.fits(config, key, device) is None:
                wanted.add((space.op, space.pass_, config.name))
    assert wanted <= found
    assert {pass_ for _, pass_, _ in found} == {"fwd", "bwd", "symmetric", "few", "norm"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_polynomial_config_is_compiled(cases: Any, target: str) -> None:
    """At the first size that it serves, default ones at every size, by the kernel of its own."""
    device = target_device(target)
    found = {
        (case.op, case.pass_, case.config.name, case.source.constexprs["P"],
         case.source.half_precision)
        for case in cases["polynomial", target, False]
        if case.source.name in ("expand", "contract", "read", "pull", "update")
    }  # fmt: skip
    wanted, served = set(), set()
    for space, (width, values), dtype in itertools.product(
        polynomial.SPACES, polynomial.SIZES, (torch.bfloat16, torch.float32)
    ):
        shape = replace(polynomial._compile_shape(space, width, values), dtype=dtype)
        key = space.bucket(shape)
        for config in space.fitting(key, device):
            name = (space.op, space.pass_, config.name)
            if config == space.default(key, device) or (*name, dtype) not in served:
                wanted.add((*name, width, dtype == torch.bfloat16))
            served.add((*name, dtype))
    assert found == wanted
    names = {(op, pass_, config) for op, pass_, config, _, _ in found}
    configs = sum(len(space.configs) for space in polynomial.SPACES)
    assert len(names) == configs or target == "sm_80"


def space_key(space: Any, config: Any) -> Any:
    """The key of the largest matrices that a config may serve."""
    rows = config.get("ROWS") or 512
    cols = config.get("COLS") or rows
    dtype = torch.bfloat16 if config.get("HALF", 1) else torch.float32
    return space.bucket(newton_schulz._compile_shape(dtype, rows, cols))


def test_tall_matrices_are_compiled_once_a_kernel(cases: Any) -> None:
    tall: Counter[str] = Counter()
    ragged = set()
    for case in cases["newton_schulz", "sm_90", False]:
        source = case.source
        kernel = source.name.partition("<")[0]
        if isinstance(source, CudaSource):
            tall[kernel] += "true" in source.name
        elif "X_ORDER" in source.constexprs:
            tall[kernel] += source.constexprs["X_ORDER"] == 1
            if not source.constexprs["EXACT"]:
                ragged.add((case.pass_, case.config["ROWS"], case.config["COLS"]))
    once = {"newton_schulz_fwd", "newton_schulz_bwd"}
    if newton_schulz.cuda_runtime.missing() is None:
        once |= {f"fastweights::newton_schulz{x}" for x in ("", "_wide", "_backward")}
    assert {kernel for kernel, times in tall.items() if times} == once
    assert max(tall.values()) == 1
    assert {("fwd", 128, 256), ("fwd", 16, 1024), ("bwd", 64, 256)} <= ragged


OMEGA = {
    "fwd": ("omega_gates", "omega_chain", "omega_reads"),
    "bwd": (
        "omega_chain", "omega_pull", "omega_chain_back", "omega_gradients",
        "omega_gradients of older keys", "omega_edges",
    ),
    "fwd_symmetric": ("repack", "omega_lay_out", "omega_walk_symmetric", "omega_reads_symmetric"),
    "bwd_symmetric": (
        "omega_lay_out", "omega_walk_symmetric", "omega_tables_symmetric", "omega_pull_symmetric",
        "omega_walk_back_symmetric", "omega_pairs_back", "omega_features_back", "omega_inner",
    ),
}  # fmt: skip


def omega_kernel(case: CompileCase) -> str:
    older = case.source.constexprs.get("OLDER")
    return case.source.name + (" of older keys" if older else "")


@pytest.mark.parametrize("target", TARGETS)
def test_every_omega_config_is_compiled_with_each_of_its_kernels(cases: Any, target: str) -> None:
    """The gates of a backward are those of its forward. Kernels for Hopper are on Hopper alone."""
    found = defaultdict(set)
    for case in cases["omega", target, False]:
        found[case.pass_, case.config].add(omega_kernel(case))
    wanted = {
        (space.pass_, config)
        for space in omega.SPACES
        for config in space.configs
        if target == "sm_90" or not config.get("HOPPER")
    }
    assert found.keys() == wanted
    for (pass_, config), kernels in found.items():
        if pass_.endswith("symmetric"):  # those of other passes, but for some calls
            kernels = kernels - {"omega_gates", "omega_gates_back"}
        assert config.get("HOPPER") or kernels == set(OMEGA[pass_])


def test_default_omega_configs_are_compiled_for_the_rules_that_differ_most(cases: Any) -> None:
    names = ("MOMENTUM", "PACKED", "TAIL", "CHUNK", "D")
    plain = (False, False, False, 64, 64)
    by_kernel = defaultdict(set)
    for case in cases["omega", "sm_90", False]:
        constants = case.source.constexprs
        if omega_kernel(case) in OMEGA["bwd"][:-1] and constants["D"] >= 64:
            size = 2 if case.source.half_precision else 4
            rules = tuple(constants[name] for name in names)
            by_kernel[(case.pass_, omega_kernel(case), size)].add(rules)
    assert by_kernel.keys() >= {("bwd", name, 4) for name in OMEGA["bwd"][:-1]}
    for (_, _, size), found in by_kernel.items():
        others = {(True, True, True, 64, 64), (False, False, False, 16, 64)}
        others.add((False, False, False, 64, 128))
        assert found == ({plain} if size == 4 else {plain, *others})
