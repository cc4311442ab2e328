"""Paged caches for the tests of `polar_decode` and `paged_cache_write_`, NaN where no key is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fastweights import ops

from . import inputs

LAYOUTS = ("contiguous", "pair", "heads_first", "misaligned", "odd_stride", "spaced")


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same cache (pages, page_size, Hk, D) as a view of the named layout."""
    if layout == "contiguous":
        return x
    if layout == "pair":  # every second page of a buffer, heads padded
        pages, size, heads, width = x.shape
        return inputs.embed(x[:, None].expand(pages, 2, size, heads, width))[:, 1]
    if layout == "heads_first":
        return inputs.embed(x.transpose(1, 2)).transpose(1, 2)
    if layout == "misaligned":
        return inputs.embed(x, offset=1)
    if layout == "odd_stride":
        return inputs.embed(x, pad=1)
    if layout == "spaced":
        return inputs.spaced(x)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


@dataclass(frozen=True)
class Case:
    """One call: lengths of its sequences, sizes, rules, and how its caches lie in memory.

    `base` is the null's: 6 lets it win, −20 leaves it nothing. `spare`: columns of the block tables
    that no sequence needs. `loud`: keys along the queries, so that few weights are large.
    """

    lengths: tuple[int, ...] = (5, 40, 0, 33)
    heads: tuple[int, int] = (4, 2)
    width: int = 16
    page_size: int = 16
    window: int | None = None
    null_value: bool = True
    base: float = 1.0
    spare: int = 2
    loud: bool = False
    layout: str = "pair"

    @property
    def name(self) -> str:
        """What differs from the defaults."""
        changed = [
            f"{field}{value}"
            for field, value in vars(self).items()
            if value != getattr(Case(), field)
        ]
        return "-".join(changed).replace(" ", "") or "plain"

    def but(self, **changes: Any) -> Case:
        """The same case with changes."""
        return replace(self, **changes)

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """All arguments of a call but the backend."""
        source = inputs.generator(seed, device)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return inputs.normal(shape, source, dtype, scale)

        hq, hk = self.heads
        batch, longest = len(self.lengths), max(self.lengths, default=0)
        blocks = -(-longest // self.page_size) + self.spare
        needed = [-(-n // self.page_size) for n in self.lengths]
        pages = sum(needed) + 2
        order = torch.randperm(pages, generator=source, device=device).to(torch.int32)
        tables = torch.full((batch, blocks), -1, dtype=torch.int32, device=device)
        q = normal(batch, hq, self.width, scale=3.0 if self.loud else 1.0)
        nothing = torch.full(
            (pages, self.page_size, hk, self.width), float("nan"), dtype=dtype, device=device
        )
        k_cache, v_cache = lay_out(nothing, self.layout), lay_out(nothing.clone(), self.layout)
        taken = 0
        for b, n in enumerate(self.lengths):
            mine = order[taken : taken + needed[b]]
            tables[b, : needed[b]] = mine
            taken += needed[b]
            at = torch.arange(n, device=device)
            page, offset = mine.long()[at // self.page_size], at % self.page_size
            k_cache[page, offset] = normal(n, hk, self.width)
            v_cache[page, offset] = normal(n, hk, self.width)
        head = 0.5 + torch.rand(4, hq, generator=source, device=device)
        wide = dtype if dtype == torch.float64 else torch.float32
        return {
            "q": inputs.embed(q),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_tables": tables,
            "context_lens": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            "null_value": normal(hq, self.width) if self.null_value else None,
            "null_base": (self.base * head[0]).to(wide),
            "null_slope": head[1].to(wide),
            "length_gain": (0.3 * head[2]).to(wide),
            "magnitude_gain": (0.2 * head[3]).to(wide),
            "window": self.window,
            "max_context_len": max(longest, 1),
        }


CASES = [
    Case(),
    Case(null_value=False),
    Case(lengths=(1, 2, 15, 16, 17), heads=(3, 1)),
    Case(lengths=(40, 3, 100, 0), window=1),
    Case(lengths=(40, 3, 100, 0), window=16, heads=(2, 2)),
    Case(lengths=(40, 3, 100), window=37, page_size=32),
    Case(lengths=(70,), window=500, page_size=64, heads=(8, 1)),
    Case(lengths=(130, 1, 128), page_size=128, heads=(6, 3), width=20),
    Case(lengths=(257, 0, 256), page_size=256, width=8),
    Case(lengths=(33, 64), page_size=7, width=5),
    Case(lengths=(20, 9), page_size=1, spare=0),
    Case(base=6.0),
    Case(base=12.0, null_value=False),
    Case(base=-20.0, loud=True),
    Case(lengths=(0, 0)),
]


def parameters(given: dict[str, Any]) -> dict[str, Any]:
    """The null and the gains of a call."""
    names = ("null_value", "null_base", "null_slope", "length_gain", "magnitude_gain")
    return {name: given[name] for name in names}


def sequence(given: dict[str, Any], b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence as (1, n, Hk, D)."""
    n, size = int(given["context_lens"][b]), given["k_cache"].shape[1]
    at = torch.arange(n, device=given["q"].device)
    places = given["block_tables"][b].long()[at // size], at % size
    return given["k_cache"][places][None], given["v_cache"][places][None]


def last_row(given: dict[str, Any], b: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What `polar_attention` gives for the query of a sequence, (Hq, D) and (Hq,)."""
    k, v = sequence(given, b)
    direction, count = ops.polar_attention(
        given["q"][b][None, None], k, v, **parameters(given), window=given["window"],
        backend=backend,
    )  # fmt: skip
    return direction[0, 0], count[0, 0]
