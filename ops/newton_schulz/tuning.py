"""What sweeps and compile reports need of Newton–Schulz: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import reference
from ...autotune.compile import CompileCase, target_device
from ...autotune.space import Config, Device, Space, assume_device, use_config
from .. import cuda_runtime, triton_runtime
from . import cuda, gram_newton_schulz_factor, newton_schulz, triton, triton_large
from .coefficients import schedule
from .op import NewtonSchulzShape
from .triton_spaces import OP, SPACE_BWD, SPACE_FACTOR_BWD, SPACE_FACTOR_FWD, SPACE_FWD


@dataclass(frozen=True)
class Problem:
    """One stack that a sweep times.

    `factor`: the factor of its Gram matrices is asked for, which are `cols` wide. `dtypes`: those
    it is swept in unless others are asked for. 16-bit types share their buckets.
    """

    name: str
    batch: int
    rows: int
    cols: int
    factor: bool = False
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two ragged ones, wide and tall; of stacks, more matrices than run at a time."""
        short, long = sorted((self.rows, self.cols))
        if short > 1024:
            return replace(self, rows=1031, cols=2055), replace(self, rows=1500, cols=1029)
        batch = 9000 if long <= 32 else 1100 if short <= 64 else 400
        if short > 256:
            batch = self.batch
        wide = replace(self, batch=batch, rows=self.rows - 3, cols=self.cols - 1)
        return wide, replace(wide, rows=self.cols - 2, cols=self.rows - 1)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        if self.factor:
            return gram_newton_schulz_factor, reference.gram_newton_schulz_factor
        return newton_schulz, reference.newton_schulz

    @property
    def yardstick(self) -> Callable[..., Any] | None:
        """Plain torch as the kernels may round: 16-bit iterates; None where that is the reference.

        Singular values at the rounding of fp16 are lost by any iterate that is stored in it, and
        near-square random matrices have some.
        """
        return None if self.factor else stored_in_fp16

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int, batch: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call; `batch` replaces the problem's own."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (self.batch if batch is None else batch, self.rows, self.cols)
        x = torch.randn(size, generator=generator, device=device)
        return {"gram": (x.mT @ x).to(dtype)} if self.factor else {"x": x.to(dtype)}


def stored_in_fp16(x: torch.Tensor) -> torch.Tensor:
    """The default call of `newton_schulz` in plain torch; wider inputs: the reference."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return reference.newton_schulz(x)
    wide = x.float()
    iterate = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(torch.float16)
    tall = x.shape[-2] > x.shape[-1]
    iterate = iterate.mT if tall else iterate
    numbers = iter(schedule(OP, "muon", 5))
    for a, b, c in zip(numbers, numbers, numbers, strict=True):
        gram = iterate @ iterate.mT
        iterate = a * iterate + (b * gram + c * (gram @ gram)) @ iterate
    return (iterate.mT if tall else iterate).to(x.dtype)


def problem(*, m: int, n: int | None = None, B: int = 1, function: str = OP) -> Problem:
    """The problem of these sizes: B matrices of m × n; a factor has n = m."""
    cols = m if n is None else n
    return Problem(f"{B}x{m}x{cols}", B, m, cols, factor=function != OP)


PROBLEMS = (
    Problem("8192x64x64", 8192, 64, 64, dtypes=("bf16", "fp32")),
    Problem("2048x128x128", 2048, 128, 128),
    Problem("16384x32x32", 16384, 32, 32, dtypes=("bf16", "fp32")),
    Problem("16384x16x16", 16384, 16, 16),
    Problem("8192x32x64", 8192, 32, 64),
    Problem("4096x64x128", 4096, 64, 128),
    Problem("2048x64x256", 2048, 64, 256),
    Problem("1024x128x256", 1024, 128, 256),
    Problem("512x256x256", 512, 256, 256),
    Problem("2x512x512", 2, 512, 512),
    Problem("1x4096x4096", 1, 4096, 4096),
    *(Problem(f"{b}x{n}-factor", b, n, n, True, ("fp32",)) for b, n in ((8192, 32), (4096, 64))),
)
SPACES = (
    SPACE_FWD,
    SPACE_BWD,
    SPACE_FACTOR_FWD,
    SPACE_FACTOR_BWD,
    triton_large.SPACE_SYMMETRIC,
    triton_large.SPACE_FEW,
    cuda.SPACE_FWD,
    cuda.SPACE_BWD,
)


# ---- compile reports ----------------------------------------------------------------------------

QUICK = ((32, 64), (64, 64))  # rows and cols of configs
# Bytes of stack that the kernels of large tiles may use: (backend, pass, 16-bit, elements of the
# tile). All others must not spill.
MAX_STACK = {
    ("triton", "fwd", 1, 64 * 256): 128,
    ("triton", "fwd", 1, 128 * 128): 256,
    ("triton", "fwd", 1, 128 * 256): 1152,
    ("triton", "fwd", 0, 64 * 64): 1536,
    ("triton", "bwd", 1, 32 * 32): 32,
    ("triton", "bwd", 1, 64 * 64): 128,
    ("triton", "bwd", 1, 64 * 128): 320,
    ("triton", "bwd", 1, 64 * 256): 1024,
    ("triton", "bwd", 0, 32 * 64): 32,
    ("triton", "bwd", 0, 64 * 64): 4096,
    ("cuda", "fwd", 1, 128 * 128): 48,
    ("cuda", "fwd", 1, 128 * 192): 40,
    ("cuda", "fwd", 1, 128 * 256): 72,
    ("cuda", "fwd", 1, 256 * 256): 120,
    ("cuda", "bwd", 1, 64 * 64): 24,
    ("cuda", "bwd", 1, 64 * 128): 8,
    ("cuda", "bwd", 1, 64 * 192): 16,
    ("cuda", "bwd", 1, 64 * 256): 8,
    ("cuda", "bwd", 1, 128 * 128): 8,
    ("cuda", "bwd", 1, 128 * 192): 8,
    ("cuda", "bwd", 1, 128 * 256): 16,
}
MAX_STACK_SYMMETRIC = 96
MAX_STACK_FACTOR = 4096


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target, on the largest matrices that it serves.

    The launchers themselves run on meta tensors and their launches are recorded, so a report sees
    what a call would compile. Default configs are compiled for padded matrices, too, and each
    kernel for tall ones once. `quick` keeps the default configs of two sizes with fp16 iterates.
    CUDA C++ takes part where its compiler is installed.
    """
    cases: dict[tuple[str, str], CompileCase] = {}
    spaces = [SPACE_FWD, SPACE_BWD]
    if cuda_runtime.missing() is None:
        spaces += [cuda.SPACE_FWD, cuda.SPACE_BWD]
    device = target_device(target)
    with assume_device(device):
        for space in spaces:
            for config in space.configs:
                if quick and (config["ROWS"], config["COLS"]) not in QUICK:
                    continue
                for case in _cases(space, config, device, quick):
                    cases.setdefault((config.name, repr(case.source)), case)
        if not quick:
            tall = _tall_cases(spaces, device)
            for case in (*tall, *_large_cases(device), *_few_cases(device), *_factor_cases()):
                cases.setdefault((case.config.name, repr(case.source)), case)
    return list(cases.values())


def _cases(space: Space, config: Config, device: Device, quick: bool) -> list[CompileCase]:
    rows, cols = config["ROWS"], config["COLS"]
    dtype = torch.bfloat16 if config.get("HALF", 1) else torch.float32
    shape = _compile_shape(dtype, rows, cols)
    key = space.bucket(shape)
    if space.fits(config, key, device) is not None:
        return []
    shapes = [shape]
    if config == space.default(key, device):
        if not quick and dtype != torch.float32:  # which takes the compiler longest
            shapes.append(_compile_shape(dtype, rows - 1, cols - 1))
    elif quick:
        return []
    return [_recorded(space, config, each) for each in shapes]


def _tall_cases(spaces: Sequence[Space], device: Device) -> list[CompileCase]:
    """Tall matrices of the largest size whose default a kernel is: it reads them transposed.

    What does so is the same for other sizes, and takes no more stack than ragged matrices do.
    """
    cases: dict[str, CompileCase] = {}
    for space in spaces:
        for config in sorted(space.configs, key=lambda config: config["ROWS"] * config["COLS"]):
            shape = _compile_shape(torch.bfloat16, config["COLS"], config["ROWS"])
            key = space.bucket(shape)
            if not shape.tall or space.fits(config, key, device) is not None:
                continue
            if config == space.default(key, device):
                case = _recorded(space, config, shape)
                cases[case.source.name.partition("<")[0]] = case
    return list(cases.values())


def _large_cases(device: Device) -> list[CompileCase]:
    """Symmetric products, of two operands alone and with a third; and what brings x to norm one."""
    space = triton_large.SPACE_SYMMETRIC
    shape = _compile_shape(torch.bfloat16, 4096, 8192)
    with triton_runtime.record_launches() as sources:
        triton_large.normalised(
            shape, torch.empty((3, 4096, 8192), dtype=shape.dtype, device="meta")
        )
    cases = [
        CompileCase(OP, "norm", triton_large.NORM_CONFIG, source, matrix="fma")
        for source in sources
    ]
    x = torch.empty((3, 4096, 8192), dtype=torch.float16, device="meta")
    for config in space.configs:
        if space.fits(config, space.bucket(shape), device) is not None:
            continue
        with use_config(space, config), triton_runtime.record_launches() as sources:
            products = triton_large.Products(shape, 4096)
            gram = products(x, x, gamma=1.0)
            products(gram, gram, gram, gamma=1.0)
        cases += [
            CompileCase(OP, space.pass_, config, source, max_stack=MAX_STACK_SYMMETRIC)
            for source in sources
        ]
    return cases


def _few_cases(device: Device) -> list[CompileCase]:
    """Wide matrices, and tall ones whose rows start anywhere."""
    space = triton_large.SPACE_FEW
    cases = []
    for rows, cols in ((512, 512), (515, 131)):
        shape = _compile_shape(torch.bfloat16, rows, cols)
        x = torch.empty((3, rows, cols), dtype=shape.dtype, device="meta")
        for config in space.configs:
            if space.fits(config, space.bucket(shape), device) is not None:
                continue
            with use_config(space, config), triton_runtime.record_launches() as sources:
                triton_large.few(shape, x)
            cases += [CompileCase(OP, space.pass_, config, source) for source in sources]
    return cases


def _factor_cases() -> list[CompileCase]:
    cases = []
    for space in (SPACE_FACTOR_FWD, SPACE_FACTOR_BWD):
        for config in space.configs:
            rows = config["ROWS"]
            shape = replace(_compile_shape(torch.float32, rows, rows), factor=True)
            case = _recorded(space, config, shape)
            cases.append(replace(case, max_stack=MAX_STACK_FACTOR))
    return cases


def _compile_shape(dtype: torch.dtype, rows: int, cols: int) -> NewtonSchulzShape:
    return NewtonSchulzShape(
        factor=False,
        batch=3,
        rows=rows,
        cols=cols,
        dtype=dtype,
        compute_dtype=torch.float16 if dtype == torch.bfloat16 else dtype,
        device=torch.device("meta"),
        coefficients=schedule(OP, "muon", 5),
        eps=1e-7,
    )


def _recorded(space: Space, config: Config, shape: NewtonSchulzShape) -> CompileCase:
    backend: Any = {"triton": triton, "cuda": cuda}[space.backend]
    runtime: Any = {"triton": triton_runtime, "cuda": cuda_runtime}[space.backend]
    x = torch.empty((shape.batch, shape.rows, shape.cols), dtype=shape.dtype, device="meta")
    with use_config(space, config), runtime.record_launches() as sources:
        if space.pass_ == "fwd":
            backend.fwd(shape, x)
        else:
            backend.bwd(shape, x, x)
    (source,) = sources
    tile = (space.backend, space.pass_, config.get("HALF", 1), config["ROWS"] * config.get("COLS"))
    return CompileCase(space.op, space.pass_, config, source, max_stack=MAX_STACK.get(tile))
