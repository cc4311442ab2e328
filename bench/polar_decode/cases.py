"""Paged decoding: sizes, FLOPs and bytes, and the share of a copy's rate to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("copy", "sdpa-cudnn", "sdpa-flash", "eager")
OURS = "polar_decode"
EXPANDED = "expanded"


@dataclass(frozen=True)
class DecodeCase(Case):
    """Sizes and rules of one call; every sequence has `keys` keys.

    Attributes:
        batch, heads_q, heads_k, keys, width: B, Hq, Hk, S, D.
        page_size: keys of a page.
        window: None: all keys are seen.
        expanded: whether our call on caches with as many heads as there are query heads is timed
            in the same turn.
    """

    op: ClassVar[str] = "polar_decode"
    batch: int
    heads_q: int
    heads_k: int
    keys: int
    width: int = 128
    page_size: int = 64
    window: int | None = None
    expanded: bool = False
    modes: tuple[str, ...] = field(default=("fwd",), kw_only=True)
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    @property
    def seen(self) -> int:
        """Keys that a query sees."""
        return self.keys if self.window is None else min(self.keys, self.window)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations."""
        return flops.attention_forward(self.batch * self.seen, self.width, self.heads_q)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes: the keys and values that are seen, their pages, queries, results."""
        size = self.torch_dtype.itemsize
        acc = 8 if self.dtype == "fp64" else 4
        caches = 2 * self.seen * self.heads_k * self.width * size
        first = self.keys - self.seen
        pages = -(-self.keys // self.page_size) - first // self.page_size
        row = 2 * self.heads_q * self.width * size + self.heads_q * acc
        parameters = self.heads_q * (self.width * size + 4 * acc)
        return self.batch * (caches + 4 * pages + 4 + row) + parameters

    def sizes(self) -> dict[str, int | str | None]:
        """B, Hq, Hk, S, D, dtype and the rules; what is absent is None."""
        return {
            "B": self.batch,
            "Hq": self.heads_q,
            "Hk": self.heads_k,
            "S": self.keys,
            "D": self.width,
            "dtype": self.dtype,
            "page_size": self.page_size,
            "window": self.window,
        }

    def small(self) -> DecodeCase:
        """The same rules on a few shorter sequences of one or two key heads."""
        heads_k = min(self.heads_k, 2)
        group = self.heads_q // self.heads_k
        window = None if self.window is None else min(self.window, 150)
        return replace(
            self, batch=min(self.batch, 3), heads_q=group * heads_k, heads_k=heads_k,
            keys=min(self.keys, 333), window=window, expanded=False,
        )  # fmt: skip

    def with_expanded_caches(self) -> DecodeCase:
        """The same queries on caches with a key head for each of them."""
        return replace(self, heads_k=self.heads_q, expanded=False, targets=(), peers=())


def _of_copy(floor: float, good: float, aim: float) -> Target:
    return Target(OURS, "fwd", "copy", floor, good, aim)


def _gpu_cases() -> list[DecodeCase]:
    many = DecodeCase(
        "decode-b64-s8192", ("quick", "headline"), 64, 16, 4, 8192, expanded=True,
        targets=(
            _of_copy(0.8, 0.92, 1.0),
            Target(OURS, "fwd", f"{OURS}, {EXPANDED}", 3.0),
        ),
    )  # fmt: skip
    one = DecodeCase(
        "decode-b1-s65536", ("headline",), 1, 8, 2, 65536, targets=(_of_copy(0.5, 0.65, 0.8),)
    )
    plain = replace(many, expanded=False, targets=())
    return [
        many,
        one,
        replace(
            plain, name="decode-b1-s512", suites=("headline",), batch=1, heads_k=16, keys=512
        ),
        replace(
            plain, name="decode-b32-s4096", suites=("headline",), batch=32, heads_q=32, heads_k=8,
            keys=4096,
        ),
        *(
            replace(plain, name=f"decode-b64-s8192-page{size}", suites=("extra",), page_size=size)
            for size in (16, 256)
        ),
        replace(plain, name="decode-b64-s8192-window", suites=("extra",), window=1024),
        replace(plain, name="decode-b64-s8192-d64", suites=("extra",), width=64),
        replace(one, name="decode-b1-s131072-page256", suites=("extra",), keys=131072,
                page_size=256, targets=()),
    ]  # fmt: skip


def _cpu_cases() -> list[DecodeCase]:
    base = DecodeCase(
        "cpu-decode-b4-s512", ("quick",), 4, 8, 2, 512, 64, dtype="fp32", device="cpu",
        peers=("copy", "sdpa"),
    )  # fmt: skip
    return [
        base,
        replace(base, name="cpu-decode-b1-s8192", suites=("headline",), batch=1, keys=8192),
        replace(base, name="cpu-decode-window", suites=("extra",), window=100, peers=("copy",)),
        replace(base, name="cpu-decode-bf16", suites=("extra",), dtype="bf16", expanded=True),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
