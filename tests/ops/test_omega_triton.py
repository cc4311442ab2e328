"""The Omega rule's Triton kernels under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_omega_gpu.py`. A program of a chunk and head takes half a
second of the interpreter in both passes: calls here are of a few, with one seed each.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device, choose
from fastweights.ops import alloc
from fastweights.ops.omega import triton as backend
from helpers import contracts, inputs, oracle
from helpers.omega import Case, shape_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_omega_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
OP = partial(ops.omega_memory, backend="triton")
WITH_STATE = partial(OP, return_state=True)
LITERAL = partial(reference.omega_memory, return_state=True)
# Two heads of two chunks, the second a ragged one.
BASE = Case(batch=1, tokens=13)


def check(case: Case, dtype: torch.dtype = FP32) -> None:
    """y, the state and the tail, and gradients from all of them, against the loops."""
    oracle.check_op(WITH_STATE, LITERAL, case.arguments, dtype, CPU, seeds=(0,), label=case.name)


def one(**changes: Any) -> Case:
    """One head of one row."""
    return BASE.but(**{"heads": 1} | changes)


# ---- against the loops --------------------------------------------------------------------------

RULES = [
    BASE,
    BASE.but(momentum=False),
    one(decay=False),
    one(decay=False, momentum=False, gates=False, window=1),
    one(decay=False, gates=False, carried=True),
    one(momentum=False, gates=False),
    one(inner_loss="dot", carried=True),
    one(inner_loss="dot", momentum=False, decay=False),
    one(read_before=True, carried=True),
    one(read_before=True, momentum=False),
    one(batch=3, carried=True),
    one(batch=2, carried=True, momentum=False, window=5),
    one(degree=2, carried=True),
    one(degree=1, momentum=False, inner_loss="dot"),
]
PACKED = [
    one(tokens=19, packed=(0, 5, 5, 16), carried=True),
    one(tokens=17, packed=(0, 9, 17), momentum=False),
    one(tokens=12, packed=(0, 3, 3, 4, 10), carried=True, momentum=False, window=4, degree=3),
    one(tokens=9, packed=(0, 0, 7), read_before=True, inner_loss="dot"),
]
SIZES = [
    one(chunk_size=1, window=1, tokens=4),
    one(chunk_size=1, window=2, tokens=4, momentum=False),
    one(chunk_size=16, tokens=33, momentum=False),
    one(chunk_size=37, tokens=50, window=5),
    one(chunk_size=64, tokens=70, window=4, momentum=False),
    one(chunk_size=64, tokens=64, window=4),
    one(chunk_size=128, tokens=131, window=2, momentum=False),
    one(chunk_size=32, tokens=70, window=4),
    one(chunk_size=500, tokens=70, inner_loss="dot", momentum=False),
    one(chunk_size=16, tokens=5),
    one(chunk_size=16, tokens=1, carried=True),
    one(tokens=8),
    BASE.but(heads=9, tokens=3, momentum=False),
    one(width=20, values=36),
    one(width=33, values=3, momentum=False),
    one(width=1, values=1, momentum=False),
]
# Up to 8 tokens kernels know the window; more than 17 have more than 16 older keys.
WINDOWS = [
    one(window=1),
    one(window=2, momentum=False),
    one(window=5),
    one(window=8, momentum=False),
    one(window=9),
    one(window=9, carried=True, momentum=False),
    one(window=17, chunk_size=16, tokens=36, momentum=False),
    one(window=18, chunk_size=17, tokens=40, carried=True),
    one(window=18, chunk_size=37, tokens=45, momentum=False),
    one(window=65, chunk_size=64, tokens=70, momentum=False),
]


@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_rules(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed(case: Case) -> None:
    """Empty sequences, and padding full of NaN behind the last one."""
    check(case)


@pytest.mark.parametrize("degree", [None, 2])
def test_rows_of_a_tail_that_do_not_exist(degree: int | None) -> None:
    """They may hold anything."""
    case = one(batch=3, tokens=5, carried=True, degree=degree, momentum=False)

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = case.arguments(seed, dtype, device)
        for n, length in enumerate(given["tail_length"].tolist()):
            for name in ("tail_k", "tail_v"):
                given[name][n, : case.window - 1 - length] = float("nan")
        return given

    oracle.check_op(WITH_STATE, LITERAL, arguments, FP32, CPU, seeds=(0,))


@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.name)
def test_sizes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)
def test_windows(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        one(batch=2, carried=True, momentum=False, window=5),
        one(inner_loss="dot", read_before=True),
        one(degree=2, carried=True, momentum=False),
        one(tokens=19, packed=(0, 5, 5, 16), carried=True, momentum=False),
        one(chunk_size=37, tokens=50, window=18),
    ],
    ids=lambda case: case.name,
)
def test_fp16(case: Case) -> None:
    check(case, FP16)


# ---- gates --------------------------------------------------------------------------------------

EXTREMES = (0.0, 1 - 1e-7, float(torch.tensor(-30.0).exp()), 1.0)


def extreme(case: Case, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A call in which every other decay and momentum is an extreme one, mixed with common ones."""
    given = case.arguments(seed, dtype, device)
    source = inputs.generator(seed + 7, device)
    values = torch.tensor(EXTREMES)
    for name in ("decay", "momentum"):
        if name not in given:
            continue
        rows = given[name]
        drawn = values[torch.randint(0, len(values), rows.shape, generator=source)]
        extreme_here = torch.rand(rows.shape, generator=source) < 0.5
        rows[extreme_here] = drawn[extreme_here].to(rows.dtype)
        rows[:, ::5] = 0.0
    return given


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norm."""
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    "case",
    [one(tokens=29, chunk_size=16), one(tokens=29, chunk_size=29, momentum=False, carried=True)],
    ids=lambda case: case.name,
)
def test_extreme_gates(case: Case) -> None:
    """To 1e-5 of float64, whatever products of decays are: decays that are 0 have gradients."""
    given = extreme(case, 0, FP32, CPU)
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    upstream: oracle.Tensors = {}

    def draw(results: oracle.Tensors) -> oracle.Tensors:
        upstream.update(contracts.random_upstream(results))
        return upstream

    with alloc.poison():
        results, gradients = oracle.run(WITH_STATE, given, draw)
    truth, slopes = oracle.run(
        LITERAL, exact, lambda results: {name: x.double() for name, x in upstream.items()}
    )
    for name, x in (truth | slopes).items():
        if not x.is_floating_point():
            continue
        got = (results | gradients)[name]
        assert got.isfinite().all(), name
        assert apart(got, x) <= 1e-5, (name, apart(got, x))
    assert slopes["d decay"][given["decay"] == 0].any()


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_the_same_gate_everywhere(name: str, value: float) -> None:
    case = one(tokens=10)

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = case.arguments(seed, dtype, device)
        return given | {name: torch.full_like(given[name], value)}

    oracle.check_op(OP, reference.omega_memory, arguments, FP32, CPU, seeds=(0,))


@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_a_negative_decay_gives_nan(name: str) -> None:
    """Its logarithm does not exist. From its token on its head is lost, and that head alone."""
    given = BASE.arguments(0, FP32, CPU)
    given[name][0, 3, 1] = -0.5
    with alloc.poison():
        y, left = WITH_STATE(**given)
    assert left is not None
    assert y[0, 3:, 1].isnan().all()
    assert left.state[0, 1].isnan().all()
    assert y[0, :, 0].isfinite().all()
    assert left.state[0, 0].isfinite().all()


def test_gates_of_all_ones_are_none() -> None:
    """A decay of 1 and equal window gates, given or not: the same function."""
    case = one(momentum=False)
    given = case.arguments(0, FP32, CPU)
    given["decay"] = torch.ones_like(given["decay"])
    given["window_gates"] = torch.full_like(given["window_gates"], 1 / case.window)
    got = contracts.forward_backward(OP, given)
    for name in ("decay", "window_gates"):
        given.pop(name)
    for name, x in contracts.forward_backward(OP, given).items():
        torch.testing.assert_close(got[name], x, rtol=2e-6, atol=1e-7, msg=name)


# ---- every config -------------------------------------------------------------------------------


# Narrow tiles serve the first ones and fp32 with momentum; of some widths, columns are masked.
TILED = [
    one(tokens=5, width=width, values=width, momentum=momentum)
    for width, momentum in ((16, True), (32, False), (60, True), (60, False), (72, False))
]


def fitting(space: Space, case: Case) -> list[Config]:
    return space.fitting(space.bucket(shape_of(case.arguments(0, FP32, CPU))), Device.of(CPU))


def different(configs: list[Config]) -> list[Config]:
    """One for each set of tiles: warps and stages mean nothing here."""
    found: dict[Any, Config] = {}
    for config in configs:
        columns = tuple(tile for tile in config.tiles if "WARPS" not in tile[0])
        found.setdefault(columns, config)
    return list(found.values())


EVERY = [
    pytest.param(space, config, case, id=f"{space.pass_}-{case.width}-{config.name}")
    for space in (backend.SPACE_FWD, backend.SPACE_BWD)
    for case in TILED
    for config in different(fitting(space, case))
]


@pytest.mark.parametrize(("space", "config", "case"), EVERY)
def test_every_set_of_tiles(space: Space, config: Config, case: Case) -> None:
    with use_config(space, config):
        oracle.check_op(
            WITH_STATE, LITERAL, case.arguments, FP32, CPU,
            seeds=(0,), grads=space is backend.SPACE_BWD, label=config.name,
        )  # fmt: skip


def test_no_config_is_left_out() -> None:
    """But those of kernels for Hopper, which the interpreter does not run."""
    for space in (backend.SPACE_FWD, backend.SPACE_BWD):
        served = {config for case in TILED for config in fitting(space, case)}
        assert served == {config for config in space.configs if not config.get("HOPPER")}


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_defaults_are_of_the_space_on_every_device(target: str) -> None:
    """Where any fits: not fp32 everywhere, nor the widest memory and its momentum in 99 KB."""
    device = target_device(target)
    roomy = device.shared_bytes > 100 * 1024
    for space in (backend.SPACE_FWD, backend.SPACE_BWD):
        for width, momentum in itertools.product((6, 32, 64, 128), (False, True)):
            for dtype in (torch.bfloat16, FP32):
                case = one(width=width, values=width, chunk_size=64, momentum=momentum)
                key = space.bucket(shape_of(case.arguments(0, dtype, CPU)))
                configs = space.fitting(key, device)
                large = dtype == FP32 or (width == 128 and momentum and not roomy)
                assert configs or large, (space.pass_, width, momentum)
                if configs:
                    assert choose(space, key, device) in configs


def test_a_backward_that_fits_where_forward_does_not() -> None:
    """`auto` then runs forward in eager torch and backward in Triton, on an A100 for instance."""
    case = one(width=128, values=32, chunk_size=64, window=34, tokens=66, momentum=False)
    shape = shape_of(case.arguments(0, FP32, CPU))
    with assume_device(target_device("sm_80")):
        assert "no config fits" in str(backend.supports(shape, "sm_80"))
        assert backend.supports(replace(shape, backward=True), "sm_80") is None
        oracle.check_op(
            partial(WITH_STATE, backend="auto"), LITERAL, case.arguments, FP32, CPU, seeds=(0,)
        )


def test_bucket_tells_rules_apart_but_not_lengths() -> None:
    def key(case: Case, dtype: torch.dtype = FP32) -> Any:
        return backend.SPACE_FWD.bucket(shape_of(case.arguments(0, dtype, CPU)))

    same = (BASE.but(tokens=99), BASE.but(width=9), BASE.but(window=4), BASE.but(read_before=True))
    assert {key(case) for case in same} == {key(BASE)}
    others = [
        BASE.but(momentum=False), BASE.but(heads=5), BASE.but(width=20), BASE.but(values=20),
        BASE.but(chunk_size=17), BASE.but(window=1),
    ]  # fmt: skip
    found = [key(case) for case in others] + [key(BASE, FP16)]
    assert len({key(BASE), *found}) == 1 + len(found)


# ---- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        BASE.but(tokens=0, carried=True),
        BASE.but(tokens=0, momentum=False),
        BASE.but(batch=0),
        BASE.but(tokens=0, packed=(0, 0, 0), carried=True),
        BASE.but(tokens=4, packed=(0, 0), carried=True),
        BASE.but(tokens=4, packed=(0,)),
    ],
    ids=lambda case: f"{case.name}-{case.batch}-{case.packed}",
)
def test_nothing_to_write(case: Case) -> None:
    """States pass through, and so do their gradients; the tail stays what it was."""
    given = case.arguments(0, FP32, CPU)
    with alloc.poison():
        got = contracts.forward_backward(WITH_STATE, given)
    wanted = contracts.forward_backward(WITH_STATE, given | {"backend": "eager"})
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0, msg=name)


def test_no_sequences_at_all() -> None:
    """Of packed ones; what lies behind the one offset is not read as another."""
    given = BASE.but(tokens=20, packed=(20,)).arguments(0, FP32, CPU)
    given["cu_seqlens"] = torch.tensor([0, 20], dtype=torch.int32)[:1]
    with alloc.poison():
        got = contracts.forward_backward(WITH_STATE, given)
    assert {"out0", "d q", "d step"} <= got.keys()
    for name, x in got.items():
        assert not x.any(), name


def test_pieces_are_the_whole() -> None:
    """Cut at a chunk's end, a call hands state, momentum and tail to the next one."""
    case = one(tokens=21, window=5)
    given = case.arguments(0, FP32, CPU)
    whole = oracle.named(WITH_STATE(**given))
    carried: dict[str, Any] = {}
    reads = []
    for begin, end in ((0, 8), (8, 16), (16, 21)):
        piece = {
            name: x[:, begin:end] if isinstance(x, torch.Tensor) else x for name, x in given.items()
        }
        y, left = WITH_STATE(**piece, **carried)
        assert left is not None
        reads.append(y)
        carried = {"initial_state": left.state, "initial_momentum": left.momentum}
        carried |= {name: getattr(left, name) for name in ("tail_k", "tail_v", "tail_length")}
    torch.testing.assert_close(torch.cat(reads, 1), whole.pop("out0"), rtol=1e-5, atol=1e-6)
    for name, x in oracle.named((reads[-1], left)).items():
        if name != "out0":
            torch.testing.assert_close(x, whole[name], rtol=1e-5, atol=1e-6, msg=name)


def test_packed_sequences_are_separate_ones() -> None:
    """Bit for bit, gradients too."""
    lengths = (9, 0, 3)
    given = one(tokens=14, momentum=False).arguments(0, FP32, CPU)
    tokens = [name for name, x in given.items() if isinstance(x, torch.Tensor)]

    def compare(name: str, packed: torch.Tensor, alone: torch.Tensor) -> None:
        oracle.assert_bit_equal({name: packed}, {name: alone})

    contracts.check_packed(OP, given, tokens, lengths, compare)


VIEWS: dict[str, Any] = {
    "last axis strided": inputs.spaced,
    "misaligned": partial(inputs.embed, pad=1, offset=1),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_equal_bits(view: str) -> None:
    case = one(batch=2, tokens=7, heads=2, carried=True, momentum=False)
    given = {
        name: x.contiguous() if isinstance(x, torch.Tensor) else x
        for name, x in case.arguments(0, FP32, CPU).items()
    }
    views = {name: VIEWS[view](x) for name, x in given.items() if oracle.is_floating(x)}
    contracts.check_views(OP, given, views)


def test_expanded_tensors() -> None:
    """One head's keys, values and gates for both, one parameter as the state of each row."""
    case = BASE.but(batch=2, tokens=5, carried=True)
    given = case.arguments(0, FP32, CPU)
    views = {
        name: given[name][:, :, :1].expand(given[name].shape)
        for name in ("k", "v", "step", "decay", "momentum", "window_gates")
    }
    for name in ("initial_state", "initial_momentum"):
        views[name] = given[name][:1].expand(given[name].shape)
    given |= {name: x.contiguous() for name, x in views.items()}
    contracts.check_views(OP, given, views)


@pytest.mark.parametrize(
    "case",
    [one(tokens=9, carried=True), one(tokens=9, packed=(0, 4, 7), momentum=False)],
    ids=lambda case: case.name,
)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, FP32, CPU)
    contracts.check_backward_twice(OP, given)
    contracts.check_grad_out_untouched(OP, given)
    contracts.check_expanded_grad_out(OP, given)


def test_fullgraph() -> None:
    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        y, left = WITH_STATE(**given)
        assert left is not None
        return y, left.state, left.tail_k, left.tail_v

    contracts.check_fullgraph(call, one(tokens=5, momentum=False).arguments(0, FP32, CPU))


def test_opcheck() -> None:
    op = importlib.import_module("fastweights.ops.omega.op")
    case = one(tokens=5, carried=True)
    given = {
        name: x.contiguous() if isinstance(x, torch.Tensor) else x
        for name, x in case.arguments(0, FP32, CPU).items()
    }
    tensors = [given.get(name) for name in op.OmegaTensors._fields]
    leaves = [
        x.detach().requires_grad_() if x is not None and oracle.is_floating(x) else x
        for x in tensors
    ]
    rules = (case.window, case.chunk_size, case.inner_loss, "identity", False, "triton")
    contracts.check_opcheck(op.MEMORY_FWD, [(*leaves, *rules)])


# ---- what it takes, and what not ----------------------------------------------------------------


def reason(dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90", **changes: Any) -> str | None:
    case = Case(batch=1, tokens=3, heads=1, momentum=False).but(**changes)
    with assume_device(target_device(arch)):
        return backend.supports(shape_of(case.arguments(0, dtype, CPU)), arch)


def test_supports() -> None:
    for changes in (
        {}, {"chunk_size": 128}, {"chunk_size": 64, "window": 65}, {"chunk_size": 4, "window": 5},
        {"width": 128, "values": 128}, {"values": 256}, {"degree": 2},
        {"chunk_size": 500, "inner_loss": "dot"},
        {"chunk_size": 2, "window": 65, "inner_loss": "dot"},
    ):  # fmt: skip
        assert reason(**changes) is None, changes
    assert "takes chunk_size up to 128, this is 129" in str(reason(chunk_size=129))
    assert "takes window − 1 up to 4, this is 5" in str(reason(chunk_size=4, window=6))
    assert "takes window − 1 up to 64, this is 65" in str(reason(chunk_size=100, window=66))
    assert "width of features up to 128, this is 129" in str(reason(width=129))
    assert "width of v up to 256, this is 257" in str(reason(values=257))
    assert "shared memory of sm_86" in str(
        reason(FP32, "sm_86", width=128, values=128, chunk_size=128, window=65)
    )


def test_refusals_reach_the_caller() -> None:
    given = one(tokens=3).arguments(0, FP32, CPU)
    with pytest.raises(ValueError, match="'triton' cannot run this call: takes chunk_size up to"):
        OP(**given | {"chunk_size": 200})
    assert ops.explain(OP.func, **given | {"chunk_size": 200}, backend="triton").backend is None
    half = one(tokens=3).arguments(0, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        OP(**half)


def test_explain_names_the_configs() -> None:
    said = ops.explain(OP.func, **one(tokens=3).arguments(0, FP32, CPU), backend="triton")
    assert said.backend == "triton"
    assert set(said.configs) == {"fwd", "bwd"}


# ---- compile keys -------------------------------------------------------------------------------

SIGNATURES = """
    import json
    import torch
    from fastweights.ops import triton_runtime
    from fastweights.ops.omega import triton as backend
    from helpers import inputs
    from helpers.omega import Case, shape_of, tensors_of

    VIEWS = {
        "embedded": lambda x: inputs.embed(x),
        "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
    }
    for name, view in VIEWS.items():
        keys = {}
        for i in range(40):
            case = Case(
                batch=1 + i % 2, tokens=2 + 23 * i, heads=5 + i % 4, width=24, values=24,
                chunk_size=33 + i % 30, carried=True, window=4,
            )
            given = case.arguments(0, torch.bfloat16, torch.device("cpu"))
            given |= {x: view(given[x].contiguous()) for x in "qkv"}
            shape, tensors = shape_of(given), tensors_of(given)
            with triton_runtime.record_launches() as forward:
                y, *states = backend.fwd(shape, tensors)
            with triton_runtime.record_launches() as backward:
                backend.bwd(shape, view(y), *states, tensors)
            for pass_, found in (("fwd", forward), ("bwd", backward)):
                for source in found:
                    older = "older" if source.constexprs.get("OLDER") else ""
                    key = f"{pass_} {source.name} {older}"
                    keys.setdefault(key, set()).add(repr(source))
        print(name, json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_forty_lengths_and_views_compile_once() -> None:
    """One signature a kernel whatever T, B, H, chunk and strides; one more without alignment."""
    lines = contracts.run_uninterpreted(SIGNATURES)
    assert [line.split()[0] for line in lines] == ["embedded", "misaligned"]
    for line in lines:
        counts = json.loads(line.partition(" ")[2])
        kernels = {key.split()[1] for key in counts}
        assert {"omega_gates", "omega_chain", "omega_reads", "omega_gradients"} <= kernels
        assert set(counts.values()) == {1}, line
