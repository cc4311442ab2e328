"""The gated delta rule by Triton under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_gated_delta_gpu.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops.gated_delta import triton as backend
from fastweights.ops.gated_delta import tuning
from helpers import contracts, inputs, oracle
from helpers.gated_delta import TOKENS, Case

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="compiled kernels run instead, see test_gated_delta_gpu.py",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

op = importlib.import_module("fastweights.ops.gated_delta.op")
CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
GRADS = backend.SPACE_BWD is not None
RULE = partial(ops.gated_delta_rule, output_final_state=True, backend="triton")
EAGER = partial(ops.gated_delta_rule, output_final_state=True, backend="eager")
LITERAL = partial(reference.gated_delta_rule, output_final_state=True)
CASES = [
    *(Case(batch=1, tokens=tokens, carried=True) for tokens in (1, 2, 63, 64, 65, 127)),
    Case(tokens=130, heads=(1, 2, 4), width=20, values=70),
    Case(batch=1, heads=(4, 2, 1), scale=0.3),
    Case(batch=1, heads=(2, 1, 2), width=40, values=24, qk_l2norm=False, scale=-2.0, carried=True),
    Case(heads=(2, 4, 1), packed=(0, 7, 7, 64, 130), tokens=133, carried=True),
    Case(packed=(0,), heads=(2, 1, 1)),
    Case(batch=1, tokens=9, width=1, values=1),
    Case(batch=1, heads=(1, 1, 1), width=130, values=5),
    Case(batch=1, heads=(1, 1, 1), width=5, values=130, carried=True),
    Case(batch=1, tokens=127, harsh=True, carried=True),
]


def named(case: Case) -> str:
    return f"{case.name}-x{case.scale}"


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    return {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}


def both(given: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What Triton and float64 give, with gradients where there are some."""
    if GRADS:
        return contracts.forward_backward(RULE, given), contracts.forward_backward(
            EAGER, exact(given)
        )
    return oracle.named(RULE(**given)), oracle.named(EAGER(**exact(given)))


def gaps(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative to the size of each tensor."""
    assert list(got) == list(wanted)
    found = {}
    for name, x in wanted.items():
        assert got[name].isfinite().all(), name
        found[name] = float((got[name].double() - x).norm() / x.norm().clamp(min=1e-300))
    return found


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_literal(case: Case, dtype: torch.dtype) -> None:
    """On views with NaN around them, into poisoned memory."""
    oracle.check_op(
        RULE, LITERAL, case.arguments, dtype, CPU, seeds=(0,), grads=GRADS, label=case.name
    )


def test_a_thousand_tokens() -> None:
    given = Case(batch=1, tokens=1000, heads=(1, 1, 1), width=16, values=16).arguments(0, FP32, CPU)
    found = gaps(*both(given))
    assert max(found.values()) < 5e-6, found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_harsh_decays(seed: int) -> None:
    """Log-decays from U(−30, 0), one of −1e4 and one of −inf: nothing is lost behind them."""
    given = Case(batch=1, tokens=127, harsh=True, carried=True).arguments(seed, FP32, CPU)
    got, wanted = both(given)
    if GRADS:
        assert not got["d log_decay"][:, 2 * 127 // 3].any()
    found = gaps(got, wanted)
    assert max(found.values()) < 1e-5, found


def test_one_harsh_decay_among_mild_ones() -> None:
    """What a difference of running sums would lose: the mild decays behind a large one."""
    given = Case(batch=1, tokens=127, carried=True).arguments(3, FP32, CPU)
    given["log_decay"][:, 3] = -1e4
    found = gaps(*both(given))
    assert max(found.values()) < 5e-6, found


def test_equal_keys() -> None:
    """All entries of the triangle are 0.9, and powers of it would be 1e15."""
    given = Case(batch=1, tokens=100, heads=(1, 1, 1)).arguments(0, FP32, CPU)
    given["k"][:] = given["k"][:, :1]
    given["log_decay"].zero_()
    given["beta"].fill_(0.9)  # by 1 decays would have no gradient
    got, wanted = both(given)
    found = gaps(got, wanted)
    if GRADS:
        # That of the decays is small beside its terms: as near as plain torch in the same type.
        plain = gaps(contracts.forward_backward(EAGER, given), wanted)
        assert found.pop("d log_decay") < 1.5 * plain["d log_decay"], (found, plain)
    assert max(found.values()) < 1e-5, found


def test_not_a_number_stays_one() -> None:
    """Of a log-decay and of a beta, from their token on."""
    for name in ("log_decay", "beta"):
        given = Case(batch=1, tokens=80, heads=(1, 1, 1)).arguments(0, FP32, CPU)
        given[name][:, 70] = torch.nan
        o, state = RULE(**given)
        assert o[:, :64].isfinite().all()
        assert o[:, 70:].isnan().all()
        assert state.isnan().all()


def test_keys_of_nothing() -> None:
    """A vector of zeros stays one when it is normalised."""
    given = Case(batch=1, carried=True).arguments(0, FP32, CPU)
    given["k"].zero_()
    given["q"].zero_()
    o, state = RULE(**given)
    assert not o.any()
    kept = given["log_decay"].sum(1).exp()[..., None, None] * given["initial_state"]
    torch.testing.assert_close(state, kept)


def test_packed_sequences_are_those_apart() -> None:
    """Bit for bit."""
    given = Case(batch=1, tokens=140, heads=(1, 1, 2), width=16, values=16).arguments(0, FP32, CPU)
    run = partial(ops.gated_delta_rule, backend="triton")
    starts = torch.tensor([0, 1, 65, 65, 137], dtype=torch.int32)
    o, _ = run(**given, cu_seqlens=starts)
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        alone = given | {name: given[name][:, begin:end] for name in TOKENS}
        assert torch.equal(run(**alone)[0], o[:, begin:end])
    assert not o[:, 137:].any()


def test_a_call_continues_another() -> None:
    given = Case(batch=1, tokens=128, heads=(1, 1, 1), width=16, values=16).arguments(0, FP32, CPU)
    o, state = RULE(**given)
    half = [given | {name: given[name][:, at : at + 64] for name in TOKENS} for at in (0, 64)]
    first, middle = RULE(**half[0])
    second, last = RULE(**half[1], initial_state=middle)
    assert torch.equal(o, torch.cat((first, second), 1))
    assert torch.equal(state, last)


def test_nothing_to_do() -> None:
    """No tokens: the state is what it was. No sequences."""
    given = Case(tokens=0, carried=True).arguments(0, FP32, CPU)
    o, state = RULE(**given)
    assert o.shape == (2, 0, 2, 5)
    assert torch.equal(state, given["initial_state"])
    o, state = RULE(**Case(batch=0).arguments(0, FP32, CPU))
    assert (o.shape, state.shape) == ((0, 67, 2, 5), (0, 2, 6, 5))


VIEWS: dict[str, Any] = {
    "last axis strided": inputs.spaced,
    "misaligned": partial(inputs.embed, pad=1, offset=1),
    "at the end of memory": inputs.at_the_end,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    plain = Case(batch=1, carried=True, width=16, values=16).arguments(0, FP32, CPU)
    plain = {n: x.contiguous() if oracle.is_floating(x) else x for n, x in plain.items()}
    given = {n: VIEWS[view](x) if oracle.is_floating(x) else x for n, x in plain.items()}
    oracle.assert_bit_equal(oracle.named(RULE(**given)), oracle.named(RULE(**plain)))
    state = plain["initial_state"][:, :1]
    expanded = RULE(**plain | {"initial_state": state.expand(-1, 2, -1, -1)})
    whole = RULE(**plain | {"initial_state": state.repeat(1, 2, 1, 1)})
    oracle.assert_bit_equal(oracle.named(expanded), oracle.named(whole))


def test_heads_in_groups_are_those_that_are_repeated() -> None:
    """Bit for bit, though no tensor of all heads is formed."""
    given = Case(batch=1, heads=(1, 2, 4), width=16, values=16).arguments(0, FP32, CPU)
    wide = {n: given[n].repeat_interleave(4 // given[n].shape[2], 2) for n in ("q", "k")}
    oracle.assert_bit_equal(oracle.named(RULE(**given)), oracle.named(RULE(**given | wide)))


def shape_of(given: dict[str, Any]) -> Any:
    tensors = op.DeltaTensors(
        *(given[name] for name in TOKENS), given.get("initial_state"), given.get("cu_seqlens")
    )
    return op.unchecked_shape(tensors, given["scale"], given["qk_l2norm"], 1e-12)


@pytest.mark.parametrize("space", backend.SPACES, ids=lambda space: space.pass_)
def test_every_config(space: Any) -> None:
    case = Case(batch=1, tokens=70, heads=(1, 1, 2), width=20, values=130)
    truth = oracle.Oracle(LITERAL, case.arguments, FP16, CPU, seeds=(0,), grads=GRADS)
    with oracle.collected() as failures:
        for config in contracts.every_config(space, shape_of(case.arguments(0, FP16, CPU))):
            failures += [f"{config.name} {line}" for line in truth.measure(RULE).report()]


@pytest.mark.parametrize("space", backend.SPACES, ids=lambda space: space.pass_)
def test_no_config_is_left_out(space: Any) -> None:
    with assume_device(target_device("sm_90")):
        left = set(space.configs)
        for size in tuning.SIZES:
            key = space.bucket(tuning._compile_shape(*size))
            left -= set(space.fitting(key, target_device("sm_90")))
    assert not left, {config.name for config in left}


def test_opcheck() -> None:
    given = Case(batch=1, tokens=5).arguments(0, FP32, CPU)
    tensors = [given[name].contiguous() for name in TOKENS]
    call = (*tensors, None, None, 1.0, True, 1e-12, "triton")
    contracts.check_opcheck(op.DELTA_FWD, [call])


# ---- what it takes, and what not ----------------------------------------------------------------


def test_supports() -> None:
    def reason(arch: str, **changes: Any) -> str | None:
        with assume_device(target_device(arch)):
            return backend.supports(replace(tuning._compile_shape(64, 64), **changes), arch)

    for changes in (
        {}, {"width": 1, "values": 1}, {"width": 256, "values": 1000}, {"batch": 0},
        {"dtype": FP32, "width": 128}, {"width": 129, "values": 7},
    ):  # fmt: skip
        for arch in ("sm_80", "sm_90"):
            assert reason(arch, **changes) is None, changes
    assert reason("sm_90", dtype=FP32, width=256) is None
    assert "fits into the shared memory" in str(reason("sm_80", dtype=FP32, width=256))
    assert "takes keys up to 256 wide, this is 257" in str(reason("sm_90", width=257))
    assert "takes values up to 1024 wide" in str(reason("sm_90", values=1025))
    assert "takes fewer tokens" in str(reason("sm_90", batch=1 << 26))


def test_refusals_reach_the_caller() -> None:
    with pytest.raises(ValueError, match="cannot run this call: takes keys up to 256 wide"):
        RULE(**Case(batch=1, tokens=2, width=257).arguments(0, FP32, CPU))
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        RULE(**Case(batch=1, tokens=2).arguments(0, torch.bfloat16, CPU))


def test_explain_and_auto() -> None:
    given = Case(batch=1).arguments(0, FP32, CPU)
    said = ops.explain(ops.gated_delta_rule, **given, backend="triton")
    assert said.backend == "triton"
    assert set(said.configs) == {space.pass_ for space in backend.SPACES}
    shape = tuning._compile_shape(64, 64)
    assert backend.yields(shape, "cpu") is None
    assert "not been checked" in str(backend.yields(shape, "sm_90"))


def test_one_signature_for_all_lengths_heads_and_strides() -> None:
    found = contracts.run_uninterpreted(
        """
        import json
        from dataclasses import replace
        from fastweights.autotune.compile import target_device
        from fastweights.autotune.space import assume_device
        from fastweights.ops.gated_delta import tuning

        found = []
        with assume_device(target_device("sm_90a")):
            for n in range(1, 41):
                shape = tuning._compile_shape(128, 128)
                shape = replace(
                    shape, batch=n, tokens=n, heads=n, heads_q=n, heads_k=1, heads_v=n, scale=n
                )
                names = set()
                for space in tuning.SPACES:
                    one = replace(shape, backward=space.pass_.startswith("bwd"))
                    cases = tuning._recorded(space, space.configs[0], one, True)
                    names |= {repr(case.source) for case in cases}
                found.append(sorted(names))
        print(json.dumps([len(found), len({tuple(names) for names in found}), len(found[0])]))
        """
    )
    # Queries and keys are normalised by one kernel, and their gradients by another.
    assert json.loads(found[-1]) == [40, 1, 11]
