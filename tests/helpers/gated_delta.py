"""Calls of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import inputs

TOKENS = ("q", "k", "v", "log_decay", "beta")


@dataclass(frozen=True)
class Case:
    """One call; `heads` are Hq, Hk and Hv. `harsh`: log-decays down to −30, one −1e4, one −inf."""

    batch: int = 2
    tokens: int = 67
    heads: tuple[int, int, int] = (2, 2, 2)
    width: int = 6
    values: int = 5
    scale: float = 1.0
    qk_l2norm: bool = True
    carried: bool = False
    packed: tuple[int, ...] | None = None
    harsh: bool = False

    @property
    def name(self) -> str:
        """A readable test id."""
        words = [f"B{self.batch}", f"T{self.tokens}", "H" + "".join(map(str, self.heads))]
        words += [f"D{self.width}x{self.values}"] if (self.width, self.values) != (6, 5) else []
        words += [name for name in ("carried", "harsh") if getattr(self, name)]
        words += ["raw"] if not self.qk_l2norm else []
        words += ["packed"] if self.packed is not None else []
        return "-".join(words)

    def but(self, **changes: Any) -> Case:
        """Another case, a few fields changed."""
        return replace(self, **changes)

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments; views with NaN around them, and NaN in padding."""
        source = inputs.generator(seed, device)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        batch = 1 if self.packed is not None else self.batch
        heads, length = max(self.heads), self.tokens

        def drawn(count: int, size: int, scale: float = 1.0) -> torch.Tensor:
            shape = (batch, length, count, size)
            return inputs.embed(inputs.normal(shape, source, dtype, scale), tail=inputs.TAIL)

        def uniform() -> torch.Tensor:
            shape = (batch, length, heads)
            x = torch.rand(shape, generator=source, device=device, dtype=torch.float64)
            return inputs.embed(x.to(acc))

        hq, hk, hv = self.heads
        short = 1.0 if self.qk_l2norm else self.width**-0.5
        given: dict[str, Any] = {"q": drawn(hq, self.width, short)}
        given["k"] = drawn(hk, self.width, 0.7 * short)
        given["v"] = drawn(hv, self.values)
        given["log_decay"] = uniform()
        given["log_decay"].mul_(-30 if self.harsh else -0.3)
        given["beta"] = uniform()
        if self.harsh and length:
            given["log_decay"][:, length // 3] = -1e4
            given["log_decay"][:, 2 * length // 3] = -float("inf")
        if self.packed is not None:
            given["cu_seqlens"] = torch.tensor(self.packed, dtype=torch.int32, device=device)
            for name in TOKENS:
                given[name][:, self.packed[-1] :] = float("nan")
        if self.carried:
            sequences = batch if self.packed is None else len(self.packed) - 1
            shape = (sequences, heads, self.width, self.values)
            given["initial_state"] = inputs.embed(inputs.normal(shape, source, acc, 0.5))
        return given | {"scale": self.scale, "qk_l2norm": self.qk_l2norm}


RULES = ("scale", "qk_l2norm")


def one_step(given: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of a step but for memories: token t of each sequence."""
    rules = {name: given[name] for name in RULES if name in given}
    return rules | {name: given[name][:, t] for name in TOKENS}


def in_steps(
    step: Any, *, view: Any = inputs.embed, index: torch.dtype = torch.int64,
    initial_state: torch.Tensor, **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o and the last state of a call made one token at a time, in slots of a pool.

    Sequence n begins n tokens later than the first one, and rests at every third step; its rows
    are NaN when it is skipped.
    """
    batch, tokens, heads = given["beta"].shape
    device = given["v"].device
    slots = torch.arange(batch, device=device).flip(0) * 2 + 1
    pool = initial_state.new_full((2 * batch + 1, *initial_state.shape[1:]), float("nan"))
    pool[slots] = initial_state
    pool = view(pool)
    done = torch.zeros(batch, dtype=torch.long, device=device)
    sequence = torch.arange(batch, device=device)
    out = given["v"].new_full((batch, tokens, heads, given["v"].shape[3]), float("nan"))
    time = 0
    while bool((done < tokens).any()):
        live = (done < tokens) & (time >= sequence) & ((time + sequence) % 3 != 2)
        at = done.clamp(max=tokens - 1)
        rows = {name: given[name] for name in RULES if name in given}
        for name in TOKENS:
            x = given[name][sequence, at]
            x[~live] = float("nan")
            rows[name] = view(x)
        o = step(**rows, state_pool=pool, slots=torch.where(live, slots, -1).to(index))
        assert not o[~live].any(), "o of a skipped row is not 0"
        out[sequence[live], at[live]] = o[live]
        done += live
        time += 1
    rest = torch.ones(len(pool), dtype=torch.bool, device=device)
    rest[slots] = False
    assert pool[rest].isnan().all(), "a slot that no row names was written"
    return out, pool[slots]
