"""What sweeps and compile reports need of paged decoding: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import reference
from ...autotune.compile import CompileCase, KernelSource, target_device
from ...autotune.space import Config, Device, assume_device, use_config
from .. import triton_runtime as runtime
from . import polar_decode, triton
from .op import DecodeShape, DecodeTensors
from .triton_spaces import OP, SPACE_FWD, WIDE

SPILLED = 512  # bytes of stack


@dataclass(frozen=True)
class Problem:
    """One query for each of some sequences.

    Sequences fill what they may have, `ragged` ones are of lengths from 0 to that, and their caches
    are views. `splits` None leaves the number to the backend. `dtypes`: those it is swept in unless
    others are asked for. 16-bit types share their buckets.
    """

    name: str
    batch: int
    heads_q: int
    heads_k: int
    keys: int
    width: int
    page_size: int = 64
    window: int | None = None
    dtypes: tuple[str, ...] = ("bf16",)
    ragged: bool = False
    loose: bool = False
    splits: int | None = None

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """A few sequences in pages that hold a block of keys, cut, and in smaller ones, not cut."""
        heads = 2 * self.heads_q // self.heads_k
        few = replace(self, batch=5, heads_q=heads, heads_k=2, keys=777, ragged=True, splits=4)
        few = replace(few, page_size=256)
        return few, replace(few, batch=3, keys=301, page_size=16, window=190, splits=1)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {
            "window": self.window,
            "max_context_len": self.keys,
            "num_splits": self.splits,
        }

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return polar_decode, reference.polar_decode

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Any]:
        """Fresh random tensors of the call, pages in any order."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(dtype)

        blocks = -(-self.keys // self.page_size)
        pages = self.batch * blocks
        order = torch.randperm(pages, generator=generator, device=device)
        lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device=device)
        if self.ragged:
            lengths = torch.linspace(0, self.keys, self.batch, device=device).to(torch.int32)
        caches = (
            self._cache(normal(pages, self.page_size, self.heads_k, self.width)) for _ in range(2)
        )
        k_cache, v_cache = caches
        # Parameters are read as fp32.
        head = torch.rand(4, self.heads_q, generator=generator, device=device)
        if dtype == torch.float64:
            head = head.double()
        return {
            "q": normal(self.batch, self.heads_q, self.width),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_tables": order.to(torch.int32).view(self.batch, blocks),
            "context_lens": lengths,
            "null_value": normal(self.heads_q, self.width),
            "null_base": 2 * head[0],
            "null_slope": 0.5 + head[1],
            "length_gain": 0.3 * head[2],
            "magnitude_gain": 0.2 * head[3],
        }

    def _cache(self, x: torch.Tensor) -> torch.Tensor:
        """The same cache, or a view whose rows are not a multiple of 16 bytes apart."""
        if not self.loose:
            return x
        rows = x.new_zeros(*x.shape[:3], x.shape[3] + 1)
        rows[..., :-1] = x
        return rows[..., :-1]


def problem(
    *,
    B: int,
    T: int,
    D: int = 128,
    Hq: int = 16,
    Hk: int = 0,
    page: int = 64,
    window: int = 0,
    function: str = OP,
) -> Problem:
    """The problem of these sizes, T keys a sequence, Hk as Hq by default; 0: no window."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    heads_k = Hk or Hq
    words = [f"B{B}", f"T{T}", f"H{Hq}", f"{heads_k}" if heads_k != Hq else "", f"D{D}"]
    words += [f"page{page}", f"window{window}" if window else ""]
    name = "-".join(filter(None, words))
    return Problem(name, B, Hq, heads_k, T, D, page, window or None)


PROBLEMS = (
    Problem("B64-T8192", 64, 16, 4, 8192, 128),
    Problem("B32-T4096", 32, 32, 8, 4096, 128),
    Problem("B1-T65536", 1, 8, 2, 65536, 128),
    Problem("B1-T512", 1, 16, 16, 512, 128),
    Problem("B16-T4096-page16", 16, 16, 4, 4096, 128, page_size=16),
    Problem("B64-T2048-D64", 64, 16, 4, 2048, 64),
    Problem("B1-T65536-D64", 1, 8, 2, 65536, 64),
    Problem("B16-T4096-D256", 16, 16, 4, 4096, 256),
    Problem("B16-T4096-fp32", 16, 16, 4, 4096, 128, dtypes=("fp32",)),
    Problem("B16-T2048-loose", 16, 16, 4, 2048, 128, loose=True),
)
SPACES = (SPACE_FWD,)


# ---- compile reports ----------------------------------------------------------------------------

# Every config that fits one of these widths and types is compiled once; of the first one, all.
_WIDTHS = (
    (128, torch.bfloat16),
    (64, torch.bfloat16),
    (256, torch.bfloat16),
    (32, torch.bfloat16),
    (16, torch.bfloat16),
    (128, torch.float32),
    (64, torch.float32),
    (256, torch.float32),
)
# What the default config is compiled for beside that, at the first width.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"num_splits": 1},
    {"num_splits": 132},
    {"num_splits": 132, "head_dim": 64},
    {"page_size": 16},
    {"page_size": 256, "window": 1000, "null_value": False},
    {"window": 1000, "num_splits": 1, "page_size": 16},
    {"heads_q": 128},
    {"head_dim": 96},
    {"head_dim": 100, "aligned": False},
    {"aligned": False, "page_size": 16},
    {"aligned": False, "dtype": torch.float32, "head_dim": 256},
    {"head_dim": 256, "heads_q": 128},
    {"dtype": torch.float32, "head_dim": 256, "heads_q": 128, "num_splits": 1},
    {"head_dim": 16, "aligned": False},
)


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Both kernels of every config that fits the target.

    The launcher itself runs on meta tensors and its launches are recorded, so a report sees what a
    call would compile. Default configs are compiled for some other rules, too. `quick` keeps the
    default config of the first width.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    with assume_device(device):
        for config, shape in _compiled(device, quick):
            for case in _recorded(config, shape):
                cases.setdefault((config, repr(case.source)), case)
    return list(cases.values())


def _compiled(device: Device, quick: bool) -> Iterator[tuple[Config, DecodeShape]]:
    """Configs, and what each is compiled for."""
    shape = _compile_shape()
    yield SPACE_FWD.default(SPACE_FWD.bucket(shape), device), shape
    if quick:
        return
    known: set[Config] = set()
    for aligned in (True, False):
        for width, dtype in _WIDTHS:
            shape = replace(_compile_shape(), head_dim=width, dtype=dtype, aligned=aligned)
            key = SPACE_FWD.bucket(shape)
            configs = SPACE_FWD.fitting(key, device)
            fresh = [config for config in configs if config not in known]
            known |= set(configs)
            yield from ((config, shape) for config in fresh)
            if configs:
                yield SPACE_FWD.default(key, device), shape
    for rules in _VARIANTS:
        shape = replace(_compile_shape(), **rules)
        key = SPACE_FWD.bucket(shape)
        if SPACE_FWD.fitting(key, device):
            yield SPACE_FWD.default(key, device), shape


def _compile_shape() -> DecodeShape:
    return DecodeShape(
        batch=8,
        heads_q=16,
        heads_k=4,
        head_dim=128,
        pages=512,
        page_size=64,
        blocks=64,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        window=None,
        max_context_len=4096,
        num_splits=8,
        null_value=True,
    )


def _recorded(config: Config, shape: DecodeShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    cache = (shape.pages, shape.page_size, shape.heads_k, shape.head_dim)
    row = (shape.heads_q, shape.head_dim)
    given = DecodeTensors(
        q=meta(shape.batch, *row, dtype=shape.dtype),
        k_cache=meta(*cache, dtype=shape.dtype),
        v_cache=meta(*cache, dtype=shape.dtype),
        block_tables=meta(shape.batch, shape.blocks, dtype=torch.int32),
        context_lens=meta(shape.batch, dtype=torch.int32),
        null_value=meta(*row, dtype=shape.dtype) if shape.null_value else None,
        null_base=meta(shape.heads_q),
        null_slope=meta(shape.heads_q),
        length_gain=meta(shape.heads_q),
        magnitude_gain=meta(shape.heads_q),
    )
    with use_config(SPACE_FWD, config), runtime.record_launches() as sources:
        triton.fwd(shape, given)
    # The three parts of fp32 queries and of single loads of keys do not fit into the registers.
    split = shape.dtype == torch.float32 and (shape.head_dim > WIDE or not shape.aligned)
    return [
        CompileCase(
            OP,
            "fwd",
            config,
            source,
            matrix="fma" if source.name == "polar_merge" else None,
            max_stack=SPILLED if split else None,
        )
        for source in sources
        if isinstance(source, KernelSource)
    ]
