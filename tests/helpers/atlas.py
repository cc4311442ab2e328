"""Calls of the Atlas memory, whole, in pieces and in single steps."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastweights import ops
from fastweights.ops import AtlasCache, OmegaState, alloc

from . import inputs, omega, oracle
from .omega_cache import poisoned_pool

TOKENS = ("q", "k", "v", "step", "decay", "window_gates", "momentum", "output_step")
CARRIED = ("initial_state", "initial_momentum", "tail_k", "tail_v", "tail_length")
FEATURES = ("feature_map", "coefficients")


@dataclass(frozen=True)
class Case(omega.Case):
    """One call, as of the Omega rule, with momentum; `stride` None is a chunk."""

    stride: int | None = 4
    ns_steps: int = 5
    ns_coefficients: Any = "muon"

    @property
    def name(self) -> str:
        """A readable test id."""
        return f"{super().name}-n{self.stride or 'b'}-w{self.wide}x{self.values}"

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `atlas_memory`."""
        given = super().arguments(seed, dtype, device)
        source = inputs.generator(seed + 1, device)
        size, acc = given["step"].shape, given["step"].dtype
        x = torch.rand(size, generator=source, device=device, dtype=torch.float64)
        given["output_step"] = inputs.embed((0.1 + 0.4 * x).to(acc))
        if self.packed is not None:
            given["output_step"][:, self.packed[-1] :] = float("nan")
        rules = {"ns_stride": self.stride, "ns_steps": self.ns_steps}
        return given | rules | {"ns_coefficients": self.ns_coefficients}


def full(case: Case, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A call whose momenta hold a chunk and more, as NS wants them: few tokens leave directions
    that are nothing but rounding, which it makes as large as the others.
    """
    given = case.arguments(seed, dtype, device)
    return given | {"momentum": inputs.embed(0.9 + 0.1 * given["momentum"].contiguous())}


class Means:
    """How far an op is from float64, beside plain torch in the same dtype: the mean over seeds.

    Of a momentum with small singular values Newton–Schulz blows up what is rounding, so that errors
    have long tails. What plain torch is off by counts as no less than the oracle's floor.
    """

    def __init__(
        self, literal: Any, arguments: Any, dtype: torch.dtype, device: torch.device,
        seeds: Sequence[int] = (0, 1, 2, 3), grads: bool = True,
    ) -> None:  # fmt: skip
        self.floor = 1e-6 if dtype == torch.float32 else 1e-3
        self.oracle = oracle.Oracle(literal, arguments, dtype, device, seeds=seeds, grads=grads)

    def report(self, op: Any) -> list[str]:
        """Results and gradients that are farther away than 1.5 times plain torch."""
        logs: dict[str, list[float]] = {}
        for seed in self.oracle.seeds:
            upstream = {name: inputs.embed(x) for name, x in seed.upstream.items()}
            draw = (lambda results, drawn=upstream: drawn) if self.oracle.grads else None
            with alloc.poison():
                got = oracle.run(op, seed.arguments, draw)
            for mine, truth, yard in zip(got, seed.truth, seed.yardstick, strict=True):
                assert list(mine) == list(truth)
                for name, x in truth.items():
                    assert mine[name].dtype == yard[name].dtype, name
                    if oracle.is_floating(x) and x.numel():
                        ours, theirs = ((y[name].double() - x).norm() for y in (mine, yard))
                        least = max(float(theirs), self.floor * float(x.norm()), 1e-30)
                        ratio = max(float(ours), 1e-3 * least) / least
                        logs.setdefault(name, []).append(math.log(ratio))
        means = {name: math.exp(sum(x) / len(x)) for name, x in logs.items()}
        return [f"{n}: {x:.2f} × plain torch" for n, x in means.items() if not x <= 1.5]


def shape_of(given: dict[str, Any]) -> Any:
    """What backends and config spaces see of a call, from its keyword arguments."""
    op = importlib.import_module("fastweights.ops.atlas.op")
    tensors = op.AtlasTensors(omega.tensors_of(given), given["output_step"])
    rules = {"inner_loss": "squared", "feature_map": "identity"} | given
    rules = {"ns_stride": None, "ns_steps": 5, "ns_coefficients": "muon", "ns_eps": 1e-7} | rules
    names = (
        "window", "chunk_size", "inner_loss", "feature_map", "read_before", "ns_stride",
        "ns_steps", "ns_coefficients", "ns_eps",
    )  # fmt: skip
    chosen = {name: rules[name] for name in names}
    return op.atlas_shape("test", tensors, **chosen, concrete=True)


def features_of(given: dict[str, Any]) -> dict[str, Any]:
    """What is said of features."""
    return {name: given[name] for name in FEATURES if name in given}


def start(case: Case, given: dict[str, Any]) -> AtlasCache:
    """The cache in front of a call's first token."""
    empty = ops.atlas_cache(
        case.batch, case.heads, case.width, case.values, window=case.window,
        chunk_size=case.chunk_size, dtype=given["q"].dtype, **features_of(given),
    )  # fmt: skip
    if "initial_state" not in given:
        return empty
    left = empty.to_state(window=case.window, **features_of(given))
    carried = {
        name: given[of] for name, of in zip(left._fields, CARRIED, strict=True) if of in given
    }
    return AtlasCache.from_state(left._replace(**carried), chunk_size=case.chunk_size)


def rules_of(given: dict[str, Any]) -> dict[str, Any]:
    """What all calls of a sequence share."""
    return {name: x for name, x in given.items() if name not in (*TOKENS, *CARRIED)}


def cut(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Tokens and gates of the tokens from `begin` to `end`."""
    return {name: given[name][:, begin:end] for name in TOKENS if name in given}


def in_pieces(
    case: Case, given: dict[str, Any], cuts: Sequence[int]
) -> tuple[torch.Tensor, OmegaState]:
    """All tokens, a call for what lies between two cuts."""
    cache = start(case, given)
    reads = []
    for begin, end in itertools.pairwise((0, *cuts, case.tokens)):
        y, cache = ops.atlas_extend(**cut(given, begin, end), cache=cache, **rules_of(given))
        reads.append(y)
    return torch.cat(reads, 1), cache.to_state(window=case.window, **features_of(given))


def in_steps(
    case: Case, given: dict[str, Any], starts: Sequence[int]
) -> tuple[torch.Tensor, OmegaState]:
    """All tokens through `atlas_step_`, in slots of a larger pool, of row n from starts[n] on.

    Rows without a token are skipped, and what they are given is NaN; so is all of the pool that
    belongs to no sequence.
    """
    begins, sequence = torch.tensor(starts), torch.arange(case.batch)
    slots = sequence.flip(0) * 2 + 1
    pool = poisoned_pool(start(case, given), slots)
    y = torch.empty_like(given["v"], memory_format=torch.contiguous_format)
    for time in range(case.tokens + max(starts)):
        token = time - begins
        live = (token >= 0) & (token < case.tokens)
        rows = {}
        for name in (name for name in TOKENS if name in given):
            x = given[name][sequence, token.clamp(0, case.tokens - 1)]
            x[~live] = float("nan")
            rows[name] = inputs.embed(x)
        read = ops.atlas_step_(
            **rows, cache=pool, slots=torch.where(live, slots, -1), **rules_of(given)
        )
        assert not read[~live].any()
        y[live, token[live]] = read[live]
    mine = AtlasCache._make(x[slots] for x in pool)
    return y, mine.to_state(window=case.window, **features_of(given))


def step_operands(case: Case) -> dict[str, Any]:
    """The arguments of a step: the second slot has a full chunk and a token, other rows none."""
    case = case.but(tokens=case.chunk_size + 1)
    given = case.arguments(0, torch.float32, torch.device("cpu"))
    head = cut(given, 0, case.chunk_size)
    _, cache = ops.atlas_extend(**head, cache=start(case, given), **rules_of(given))
    last = cut(given, case.chunk_size, case.tokens)
    token = {name: inputs.embed(x[:, 0]) for name, x in last.items()}
    pool = poisoned_pool(cache, torch.arange(case.batch))
    return token | rules_of(given) | {"cache": pool, "slots": torch.tensor([1, -1])}
