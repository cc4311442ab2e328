"""Calls of the Omega rule cut into pieces and into single steps, on caches with NaN around them."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastweights import ops
from fastweights.ops import OmegaCache, OmegaState

from . import inputs, oracle
from .omega import Case

TOKENS = ("q", "k", "v", "step", "decay", "window_gates", "momentum")
CARRIED = ("initial_state", "initial_momentum", "tail_k", "tail_v", "tail_length")


def start(case: Case, given: dict[str, Any]) -> OmegaCache:
    """The cache in front of a call's first token."""
    q, rules = given["q"], {"chunk_size": case.chunk_size}
    features = {name: given[name] for name in ("feature_map", "coefficients") if name in given}
    empty = ops.omega_cache(
        case.batch, case.heads, case.width, case.values, window=case.window,
        momentum=case.momentum, dtype=q.dtype, device=q.device, **features, **rules,
    )  # fmt: skip
    if "initial_state" not in given:
        return empty
    left = empty.to_state(window=case.window, **features)
    names = ("state", "momentum", "tail_k", "tail_v", "tail_length")
    found = {name: given.get(of) for name, of in zip(names, CARRIED, strict=True)}
    return OmegaCache.from_state(
        left._replace(**{name: x for name, x in found.items() if x is not None}), **rules
    )


def rules_of(given: dict[str, Any]) -> dict[str, Any]:
    """What all calls of a sequence share."""
    return {name: x for name, x in given.items() if name not in (*TOKENS, *CARRIED)}


def cut(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Tokens and gates of the tokens from `begin` to `end`."""
    return {name: given[name][:, begin:end] for name in TOKENS if name in given}


def in_pieces(
    case: Case, given: dict[str, Any], cuts: Sequence[int]
) -> tuple[torch.Tensor, OmegaState]:
    """All tokens through `omega_extend`, a call for what lies between two cuts."""
    cache = start(case, given)
    reads = []
    for begin, end in itertools.pairwise((0, *cuts, case.tokens)):
        y, cache = ops.omega_extend(**cut(given, begin, end), cache=cache, **rules_of(given))
        reads.append(y)
    return torch.cat(reads, 1), state_of(cache, given)


def state_of(cache: OmegaCache, given: dict[str, Any]) -> OmegaState:
    """What `omega_memory` would have left."""
    names = ("window", "feature_map", "coefficients")
    return cache.to_state(**{name: given[name] for name in names if name in given})


def in_steps(
    case: Case, given: dict[str, Any], starts: Sequence[int] | None = None,
    view: Callable[[torch.Tensor], torch.Tensor] = inputs.embed, **options: Any,
) -> tuple[torch.Tensor, OmegaState]:  # fmt: skip
    """All tokens through `omega_step_`, in slots of a larger pool, that of row n from starts[n] on.

    Rows without a token are skipped, and what they are given is NaN; so is all of the pool that
    belongs to no sequence. Tokens and the pool are laid out by `view`. `options` go to
    `omega_step_`.
    """
    device = given["q"].device
    begins = torch.tensor(starts or [0] * case.batch, device=device)
    sequence = torch.arange(case.batch, device=device)
    slots = sequence.flip(0) * 2 + 1
    pool = poisoned_pool(start(case, given), slots, view)
    y = torch.empty_like(given["v"], memory_format=torch.contiguous_format)
    for time in range(case.tokens + int(begins.max())):
        token = time - begins
        live = (token >= 0) & (token < case.tokens)
        rows = {}
        for name in TOKENS:
            if name in given:
                x = given[name][sequence, token.clamp(0, case.tokens - 1)]
                x[~live] = float("nan")
                rows[name] = view(x)
        read = ops.omega_step_(
            cache=pool, slots=torch.where(live, slots, -1), **rows, **rules_of(given), **options
        )
        assert not read[~live].any()
        y[live, token[live]] = read[live]
    mine = OmegaCache._make(None if x is None else x[slots] for x in pool)
    return y, state_of(mine, given)


def poisoned_pool(
    cache: Any, slots: torch.Tensor,
    view: Callable[[torch.Tensor], torch.Tensor] = inputs.embed,
) -> Any:  # fmt: skip
    """A pool with the memories of `cache` in `slots`, NaN in all others and around all of them."""
    pool = []
    for x in cache:
        if x is None:
            pool.append(None)
            continue
        whole = torch.full((2 * len(slots) + 2, *x.shape[1:]), 77, dtype=x.dtype, device=x.device)
        if x.is_floating_point():
            whole = view(whole.fill_(float("nan")))
        whole[slots] = x
        pool.append(whole)
    return type(cache)._make(pool)


def step_operands(
    case: Case, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    view: Callable[[torch.Tensor], torch.Tensor] = inputs.embed,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a step: the second slot has a full chunk and a token, other rows none."""
    case = case.but(tokens=case.chunk_size + 1)
    given = case.arguments(0, dtype, torch.device(device))
    cache, rules = start(case, given), rules_of(given)
    _, cache = ops.omega_extend(**cut(given, 0, case.chunk_size), cache=cache, **rules)
    pool = poisoned_pool(cache, torch.arange(case.batch, device=device), view)
    last = cut(given, case.chunk_size, case.tokens)
    token = {name: view(x[:, 0]) for name, x in last.items()}
    slots = torch.full((case.batch,), -1, device=device)
    slots[0] = min(1, case.batch - 1)
    return token | rules | {"cache": pool, "slots": slots}


def step_shape_of(given: dict[str, Any]) -> Any:
    """What the backends see of a step, from its keyword arguments."""
    op = importlib.import_module("fastweights.ops.omega_step.op")
    rules = {"inner_loss": "squared", "feature_map": "identity"} | given
    names = ("window", "chunk_size", "inner_loss", "feature_map", "read_before")
    tensors = op.StepTensors._make(map(given.get, op.StepTensors._fields))
    chosen = {name: rules[name] for name in names}
    return op.step_shape("test", tensors, given["cache"], **chosen, concrete=True)


def assert_same(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Bit for bit, field by field; of a cache, or of its first fields."""
    names = OmegaCache._fields[: len(wanted)]
    oracle.assert_bit_equal(
        {n: x for n, x in zip(names, got, strict=True) if x is not None},
        {n: x for n, x in zip(names, wanted, strict=True) if x is not None},
    )
