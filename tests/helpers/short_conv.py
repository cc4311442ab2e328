"""Calls of the short convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import inputs

TOKENS = ("x", "gate_in", "gate_out")


@dataclass(frozen=True)
class Case:
    """One call; `gates` are i and o, those before and behind the sum."""

    batch: int = 2
    tokens: int = 19
    channels: int = 6
    taps: int = 3
    gates: str = "io"
    activation: str | None = None
    residual: bool = False
    bias: bool = False
    carried: bool = False
    packed: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """A readable test id."""
        words = [f"B{self.batch}", f"T{self.tokens}", f"K{self.taps}", self.gates, self.activation]
        words += [name for name in ("residual", "bias", "carried") if getattr(self, name)]
        words += ["packed"] if self.packed is not None else []
        return "-".join(word for word in words if word)

    def but(self, **changes: Any) -> Case:
        """Another case, a few fields changed."""
        return replace(self, **changes)

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments; views with NaN around them, and NaN in padding."""
        source = inputs.generator(seed, device)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        batch = 1 if self.packed is not None else self.batch

        def drawn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return inputs.embed(inputs.normal(size, source, dtype), pad=2)

        given: dict[str, Any] = {"x": drawn(batch, self.tokens, self.channels)}
        given["weight"] = drawn(self.channels, self.taps)
        for name in ("gate_in", "gate_out"):
            if name[5] in self.gates:
                given[name] = drawn(batch, self.tokens, self.channels)
        if self.bias:
            given["bias"] = inputs.normal((self.channels,), source, dtype)
        if self.packed is not None:
            given["cu_seqlens"] = torch.tensor(self.packed, dtype=torch.int32, device=device)
            for name in TOKENS:
                if name in given:
                    given[name][:, self.packed[-1] :] = float("nan")
        if self.carried:
            sequences = batch if self.packed is None else len(self.packed) - 1
            given["initial_state"] = drawn(sequences, self.taps - 1, self.channels, dtype=acc)
        return given | {"activation": self.activation, "residual": self.residual}


def one_step(given: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of a step but for pool and slots: token t of each sequence."""
    rest = {
        name: given[name] for name in ("weight", "bias", "activation", "residual") if name in given
    }
    return rest | {name: given[name][:, t] for name in TOKENS if name in given}


def pool_of(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with the states (N, …) in slots of their own, NaN in the others, and these slots."""
    count = len(state)
    slots = torch.arange(count, device=state.device).flip(0) * 2 + 1
    pool = state.new_full((2 * count + 1, *state.shape[1:]), float("nan"))
    pool[slots] = state
    return pool, slots


def in_steps(
    step: Any, *, view: Any = inputs.embed, initial_state: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the last state of a call made one token at a time, in slots of a pool.

    Sequence n begins n tokens later than the first one, and rests at every third step; its rows
    are NaN when it is skipped.
    """
    pool, slots = pool_of(initial_state)
    pool = view(pool)
    batch, tokens, _ = given["x"].shape
    done = torch.zeros(batch, dtype=torch.long, device=pool.device)
    sequence = torch.arange(batch, device=pool.device)
    out = torch.full_like(given["x"], float("nan"), memory_format=torch.contiguous_format)
    time = 0
    while bool((done < tokens).any()):
        live = (done < tokens) & (time >= sequence) & ((time + sequence) % 3 != 2)
        at = done.clamp(max=tokens - 1)
        rows = one_step({**given, **{n: given[n][:, :1] for n in TOKENS if n in given}}, 0)
        for name in TOKENS:
            if name in given:
                x = given[name][sequence, at]
                x[~live] = float("nan")
                rows[name] = view(x)
        y = step(**rows, state_pool=pool, slots=torch.where(live, slots, -1))
        assert not y[~live].any(), "y of a skipped row is not 0"
        out[sequence[live], at[live]] = y[live]
        done += live
        time += 1
    rest = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    rest[slots] = False
    assert pool[rest].isnan().all(), "a slot that no row names was written"
    return out, pool[slots]
