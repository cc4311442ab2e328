"""The Atlas memory's compiled Triton kernels on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time, so a test loops over what shares a
truth or kernels. Momenta hold a chunk and more (`helpers.atlas.full`): what Newton–Schulz makes of
rounding in a momentum of few tokens differs from one order of sums to another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc
from fastweights.ops.atlas import triton as backend
from helpers import contracts, inputs, oracle
from helpers.atlas import Case, Means, full, shape_of

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
OP = partial(ops.atlas_memory, backend="triton")
WITH_STATE = partial(OP, return_state=True)
LITERAL = partial(reference.atlas_memory, return_state=True)
SPACES = {"fwd": backend.SPACE_FWD, "bwd": backend.SPACE_BWD}
# Three chunks of 64 and a ragged one, of more heads than one program of the gates takes.
D64 = Case(batch=1, tokens=197, heads=9, width=64, values=64, window=4, chunk_size=64, stride=None)
D128 = D64.but(width=128, values=128)
NARROW = D64.but(width=16, values=16)
FEW = D64.but(heads=3, tokens=150)


def fitting(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> list[Config]:
    key = space.bucket(shape_of(case.arguments(0, dtype, device)))
    return space.fitting(key, Device.of(device))


def skip_unless_served(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """On a GPU of little shared memory a case may have no config; elsewhere it must have one, but
    for the backward of wide states whose iterates are fp32.
    """
    if not fitting(space, case, dtype, device):
        large = dtype != BF16 and space is backend.SPACE_BWD and case.width > 64
        if large:
            pytest.skip(
                "iterates in fp32 of states this wide have no backward: plain torch runs it"
            )
        assert Device.of(device).shared_bytes < 200 * 1024, f"none for {case.name}"
        pytest.skip(f"no config of {space.pass_} fits {case.name} here: too little shared memory")


def check(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """y, the state and the tail, and gradients from all of them, against the loops."""
    for space in SPACES.values():
        skip_unless_served(space, case, dtype, device)
    assert not Means(LITERAL, partial(full, case), dtype, device).report(WITH_STATE)


# ---- against the loops --------------------------------------------------------------------------

SERVED = [(case, dtype) for case in (D64, D128, NARROW) for dtype in DTYPES]


@pytest.mark.parametrize(
    ("case", "dtype"), SERVED, ids=[f"d{case.width}-{dtype}" for case, dtype in SERVED]
)
@pytest.mark.parametrize("pass_", SPACES)
def test_every_config(pass_: str, case: Case, dtype: str, device: torch.device) -> None:
    """Twice, for the same bits; one truth serves all of them."""
    space, type_ = SPACES[pass_], DTYPES[dtype]
    backward = pass_ == "bwd"
    skip_unless_served(space, case, type_, device)
    arguments = partial(full, case)
    truth = Means(LITERAL, arguments, type_, device, grads=backward)
    given = arguments(0, type_, device)

    def run() -> tuple[torch.Tensor, ...]:
        if backward:
            return tuple(contracts.forward_backward(OP, given).values())
        return (OP(**given)[0],)

    with oracle.collected() as failures:
        for config in contracts.every_config(space, shape_of(given)):
            failures += [f"{config.name} {line}" for line in truth.report(WITH_STATE)]
            contracts.check_repeatable(run, 3)


def test_no_config_is_left_out(device: torch.device) -> None:
    """By the cases above, here or on a Hopper."""
    for space in SPACES.values():
        left = set(space.configs)
        for target in (Device.of(device), target_device("sm_90")):
            with assume_device(target):
                for case, dtype in SERVED:
                    left -= set(fitting(space, case, DTYPES[dtype], device))
        assert not left, {config.name for config in left}


RULES = [
    FEW.but(window=1, gates=False, decay=False),
    FEW.but(carried=True, batch=2),
    FEW.but(inner_loss="dot", carried=True),
    FEW.but(read_before=True),
    FEW.but(read_before=True, tokens=192, carried=True),
    FEW.but(tokens=128),
    FEW.but(degree=2, carried=True),
    FEW.but(packed=(0, 70, 70, 134, 140), carried=True),
    FEW.but(packed=(0, 1, 64, 65, 150)),
    FEW.but(packed=(0, 128, 150), read_before=True),
    FEW.but(width=48, values=80),
    FEW.but(width=80, values=48, carried=True),
    FEW.but(width=100, values=20),
    FEW.but(width=20, values=100),
    FEW.but(width=6, values=5),
    FEW.but(chunk_size=37),
    FEW.but(chunk_size=37, window=17, carried=True),
    FEW.but(window=18),
    FEW.but(window=65),
    FEW.but(chunk_size=128, tokens=300),
    FEW.but(chunk_size=16, carried=True, batch=2, window=5),
    FEW.but(chunk_size=1, window=2, tokens=40),
    FEW.but(ns_steps=3, ns_coefficients=[(3.0, -3.2, 1.2), (1.5, -0.5, 0.0)]),
    FEW.but(ns_coefficients="polar_express", ns_steps=6),
    FEW.but(tokens=11),
    FEW.but(tokens=1, carried=True),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            ("bf16", "fp16", "fp32")[turn % 3 if max(case.width, case.values) <= 64 else 0],
            id=f"{turn}-{case.name}",
        )
        for turn, case in enumerate(RULES)
    ],
)
def test_rules(case: Case, dtype: str, device: torch.device) -> None:
    """Padding behind packed sequences is NaN."""
    check(case, DTYPES[dtype], device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_views(dtype: str, device: torch.device) -> None:
    """Addresses and strides that are no multiples of 16 bytes, and the last axis strided."""
    for view in (partial(inputs.embed, pad=1, offset=1), inputs.spaced):

        def arguments(
            seed: int, dtype: torch.dtype, device: torch.device, view: Any = view
        ) -> dict[str, Any]:
            given = full(FEW, seed, dtype, device)
            return given | {name: view(given[name].contiguous()) for name in "qkv"}

        assert not Means(LITERAL, arguments, DTYPES[dtype], device).report(WITH_STATE)


@pytest.mark.parametrize("value", [0.0, 1 - 1e-7, 1.0])
@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_extreme_gates(name: str, value: float, device: torch.device) -> None:
    """Nothing is divided by a gate, and a gate of 0 has a gradient."""

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = full(FEW, seed, dtype, device)
        given[name][:, ::33] = value
        return given

    for dtype in (BF16, FP32):
        assert not Means(LITERAL, arguments, dtype, device).report(WITH_STATE)


def test_a_momentum_of_zeros(device: torch.device) -> None:
    """Writes zeros, and has the gradient 0 instead of 1/eps."""
    for dtype in (BF16, FP32):
        given = full(FEW, 0, dtype, device)
        given["step"] = torch.zeros_like(given["step"])
        got = contracts.forward_backward(OP, given)
        assert not any(x.any() for x in got.values())


def test_more_programs_than_65535(device: torch.device) -> None:
    """Of many short rows: bits are those that a row has alone."""
    case = FEW.but(batch=35_000, tokens=20, heads=2, width=16, values=16, chunk_size=16)
    given = full(case, 0, BF16, device)
    y = OP(**given)[0]
    last = {n: x[-1:] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    assert torch.equal(OP(**last)[0], y[-1:])


# ---- contracts ----------------------------------------------------------------------------------


def test_contracts(device: torch.device) -> None:
    given = full(FEW, 0, BF16, device)
    run = partial(OP)
    turned = {name: x.contiguous() for name, x in given.items() if isinstance(x, torch.Tensor)}
    contracts.check_views(run, given, turned)
    contracts.check_backward_twice(run, given)
    contracts.check_grad_out_untouched(run, given)
    contracts.check_expanded_grad_out(run, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(run, given).values()), 20)


def test_fullgraph(device: torch.device) -> None:
    def call(**given: Any) -> torch.Tensor:
        return OP(**given)[0]

    contracts.check_fullgraph(call, full(FEW, 0, BF16, device))


def test_cuda_graph_replays(device: torch.device) -> None:
    given = contracts.leaves(full(FEW, 0, BF16, device))
    tensors = [x for x in given.values() if oracle.is_floating(x)]
    upstream = torch.randn_like(OP(**given)[0])

    def step() -> tuple[torch.Tensor, ...]:
        y = OP(**given)[0]
        return (y, *torch.autograd.grad(y, tensors, upstream))

    graph, captured = contracts.captured(step, device)
    for seed in range(3):
        fresh = full(FEW, seed, BF16, device)
        with torch.no_grad():
            for name, x in given.items():
                if isinstance(x, torch.Tensor):
                    x.copy_(fresh[name])
        graph.replay()
        got = {str(i): x.detach().clone() for i, x in enumerate(captured)}
        expected = {str(i): x.detach() for i, x in enumerate(step())}
        oracle.assert_bit_equal(got, expected, f"replay {seed}")


def test_no_host_sync(device: torch.device) -> None:
    given = contracts.leaves(full(FEW, 0, BF16, device))
    tensors = [x for x in given.values() if oracle.is_floating(x)]
    y = OP(**given)[0]
    upstream = torch.randn_like(y)
    torch.autograd.grad(y, tensors, upstream)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with alloc.poison():
            y = OP(**given)[0]
            found = torch.autograd.grad(y, tensors, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.isfinite().all() for x in (y, *found))
