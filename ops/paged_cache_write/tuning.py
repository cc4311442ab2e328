"""What sweeps and compile reports need of cache writes: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import reference
from ...autotune.compile import CompileCase, KernelSource, target_device
from ...autotune.space import Config, assume_device, use_config
from .. import triton_runtime as runtime
from . import paged_cache_write_, triton
from .op import WriteShape, WriteTensors
from .triton_spaces import OP, SPACE_FWD


def _literal(**given: Any) -> None:
    given.pop("backend", None)
    reference.paged_cache_write_(**given)


@dataclass(frozen=True)
class Problem:
    """Tokens to slots of a cache that has twice as many.

    `few`: a small one, some of whose tokens are skipped. `loose`: k and v start anywhere. `dtypes`:
    those it is swept in unless others are asked for. 16-bit types share their buckets.
    """

    name: str
    tokens: int
    heads: int
    width: int
    page_size: int = 64
    dtypes: tuple[str, ...] = ("bf16",)
    few: bool = False
    loose: bool = False

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two of the same width."""
        few = replace(self, tokens=37, heads=3, few=True)
        return few, replace(few, tokens=301, heads=1, page_size=16)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return paged_cache_write_, _literal

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that the call writes."""
        return ("k_cache", "v_cache")

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Any]:
        """Fresh random arguments of the call."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(dtype)

        pages = -(-2 * self.tokens // self.page_size)
        row = (self.heads, self.width)
        slots = torch.randperm(pages * self.page_size, generator=generator, device=device)
        slots = slots[: self.tokens]
        if self.few:
            slots[::4] = -1
        k, v = normal(2, self.tokens, self.heads, self.width + self.loose).unbind(0)
        return {
            "k": k[..., : self.width],
            "v": v[..., : self.width],
            "k_cache": normal(pages, self.page_size, *row),
            "v_cache": normal(pages, self.page_size, *row),
            "slot_mapping": slots,
        }


def problem(*, N: int, D: int = 128, H: int = 4, page: int = 64, function: str = OP) -> Problem:
    """The problem of these sizes, N tokens."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    return Problem(f"N{N}-H{H}-D{D}-page{page}", N, H, D, page)


PROBLEMS = (
    Problem("N64", 64, 4, 128),
    Problem("N8192", 8192, 4, 128),
    Problem("N65536", 65536, 8, 128),
    Problem("N8192-D64", 8192, 4, 64),
    Problem("N8192-fp32", 8192, 4, 128, dtypes=("fp32",)),
    Problem("N8192-loose", 8192, 4, 128, loose=True),
)
SPACES = (SPACE_FWD,)


# ---- compile reports ----------------------------------------------------------------------------

_WIDTHS = ((128, torch.bfloat16), (64, torch.bfloat16), (16, torch.bfloat16), (256, torch.float32))


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """The kernel of every config, once; `quick` keeps the default config of the first width.

    The launcher itself runs on meta tensors and its launches are recorded, so a report sees what a
    call would compile.
    """
    device = target_device(target)
    cases: list[CompileCase] = []
    known: set[Config] = set()
    with assume_device(device):
        for aligned in (True, False):
            for width, dtype in _WIDTHS:
                shape = _compile_shape(width, dtype, aligned)
                key = SPACE_FWD.bucket(shape)
                default = SPACE_FWD.default(key, device)
                if quick:
                    return _recorded(default, shape)
                for config in (default, *SPACE_FWD.fitting(key, device)):
                    if config not in known or config == default:
                        cases += _recorded(config, shape)
                    known.add(config)
    return list({(case.config, repr(case.source)): case for case in cases}.values())


def _compile_shape(width: int, dtype: torch.dtype, aligned: bool) -> WriteShape:
    return WriteShape(
        tokens=8192,
        heads=4,
        head_dim=width,
        pages=256,
        page_size=64,
        dtype=dtype,
        device=torch.device("meta"),
        aligned=aligned,
    )


def _recorded(config: Config, shape: WriteShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    row = (shape.heads, shape.head_dim)
    given = WriteTensors(
        k=meta(shape.tokens, *row),
        v=meta(shape.tokens, *row),
        k_cache=meta(shape.pages, shape.page_size, *row),
        v_cache=meta(shape.pages, shape.page_size, *row),
        slot_mapping=meta(shape.tokens, dtype=torch.int64),
    )
    with use_config(SPACE_FWD, config), runtime.record_launches() as sources:
        triton.fwd(shape, given)
    return [
        CompileCase(OP, "fwd", config, source)
        for source in sources
        if isinstance(source, KernelSource)
    ]
