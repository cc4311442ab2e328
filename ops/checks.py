"""Argument checks shared by all public functions.

Each raises `TypeError` or `ValueError` whose message names the argument, says what came and what
is accepted. They look at shapes, dtypes and devices, never at values on a GPU: no check syncs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import inf

import torch

HALF_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (*HALF_AND_SINGLE, torch.float64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(op: str, name: str, x: object, layout: str, dtypes: Sequence[torch.dtype]) -> None:
    """Require a plain tensor with as many dimensions as `layout` has letters ("B T H D").

    A layout that begins with "..." ("... m n") allows any number of dimensions in front.

    Raises:
        TypeError: not a tensor, a DTensor, or a dtype outside `dtypes`.
        ValueError: another number of dimensions.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if type(x).__name__ == "DTensor":
        raise TypeError(
            f"{op}: {name} is a DTensor; pass the local tensor (x.to_local()) or, where the result "
            "depends on the whole, the gathered one (x.full_tensor()): the op does not redistribute"
        )
    if x.dtype not in dtypes:
        accepted = ", ".join(_name(d) for d in dtypes)
        raise TypeError(f"{op}: {name} has dtype {_name(x.dtype)}; accepted: {accepted}")
    letters = layout.split()
    batched = letters[0] == "..."
    needed = len(letters) - batched
    if x.ndim < needed or (x.ndim > needed and not batched):
        raise ValueError(
            f"{op}: {name} must have {'at least ' * batched}{needed} dimensions "
            f"({', '.join(letters)}), got shape {tuple(x.shape)}"
        )


def size(op: str, name: str, x: torch.Tensor, dim: int, expected: int, meaning: str) -> None:
    """Require `x.shape[dim] == expected`; `meaning` says where the expected size comes from."""
    if x.shape[dim] != expected:
        raise ValueError(
            f"{op}: {name} has size {x.shape[dim]} in dimension {dim}, expected {expected} "
            f"({meaning})"
        )


def same_device(op: str, name: str, x: torch.Tensor, device: torch.device) -> None:
    """Require that `x` lives on `device`."""
    if x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}, expected {device}")


def same_dtype(op: str, name: str, x: torch.Tensor, dtype: torch.dtype, of: str) -> None:
    """Require that `x` has `dtype`, the dtype of argument `of`."""
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} has dtype {_name(x.dtype)}, {of} has {_name(dtype)}")


def positive(op: str, name: str, value: int | None) -> None:
    """Require None or an int of at least 1."""
    if value is not None and value < 1:
        raise ValueError(f"{op}: {name} must be at least 1, got {value}")


def above_zero(op: str, name: str, value: float) -> None:
    """Require a finite number above 0."""
    if not (isinstance(value, (int, float)) and 0 < value < inf):
        raise ValueError(f"{op}: {name} must be a finite number above 0, got {value!r}")


def choice(op: str, name: str, value: str, accepted: Sequence[str]) -> None:
    """Require one of a few words."""
    if value not in accepted:
        raise ValueError(f"{op}: {name} must be one of {', '.join(accepted)}, got {value!r}")


def cu_seqlens(
    op: str, name: str, cu: torch.Tensor, device: torch.device, batch: int, total: int
) -> None:
    """Require packed-sequence offsets: int32 (N+1,), start 0, non-decreasing, end <= `total`.

    Values are read on CPU tensors only; on a GPU that would be a sync.
    """
    tensor(op, name, cu, "N+1", (torch.int32,))
    same_device(op, name, cu, device)
    if batch != 1:
        raise ValueError(f"{op}: {name} needs batch size 1 (sequences packed along T), got {batch}")
    if cu.shape[0] < 1:
        raise ValueError(f"{op}: {name} must hold at least the starting 0, got an empty tensor")
    if readable(cu):
        values = cu.tolist()
        if values[0] != 0 or any(a > b for a, b in itertools.pairwise(values)):
            raise ValueError(f"{op}: {name} must start at 0 and never decrease, got {values}")
        if values[-1] > total:
            raise ValueError(f"{op}: {name} ends at {values[-1]}, past the {total} tokens given")


def slots(
    op: str, name: str, x: torch.Tensor, device: torch.device, rows: int, pool: int, *,
    of: str = "q", dtypes: Sequence[torch.dtype] = (torch.int64,),
) -> None:  # fmt: skip
    """Require int64 (`rows`,), the rows of `of`: distinct places in a pool of `pool`, or −1.

    Values are read on CPU tensors only; on a GPU that would be a sync.
    """
    tensor(op, name, x, "N", dtypes)
    same_device(op, name, x, device)
    size(op, name, x, 0, rows, f"the rows of {of}")
    if readable(x):
        values = x.tolist()
        if any(not -1 <= value < pool for value in values):
            raise ValueError(f"{op}: {name} must be -1 … {pool - 1}, got {values}")
        taken = [value for value in values if value >= 0]
        if len(taken) != len(set(taken)):
            raise ValueError(f"{op}: {name} must be distinct, got {values}")


def writable(
    op: str, given: dict[str, torch.Tensor | None], written: dict[str, torch.Tensor], twin: str
) -> None:
    """Refuse what cannot be written in place, and what would lose its gradient by that."""
    reason = "the op writes in place and has no gradient"
    without_gradient(op, given | written, reason, twin)
    for name, x in written.items():
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{op}: {name} is expanded, it cannot be written in place")


def without_gradient(
    op: str, given: Mapping[str, torch.Tensor | None], reason: str, twin: str
) -> None:
    """Refuse tensors whose gradient a call would lose; `twin` is what to do instead."""
    for name, x in given.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{op}: {name} requires grad; {reason}: call it under torch.no_grad(), or {twin}"
            )


def readable(x: torch.Tensor) -> bool:
    """Whether values can be looked at without a sync: real ones, on the CPU, outside of a trace."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_fake(x)


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def aligned(x: torch.Tensor) -> bool:
    """Whether base and strides are multiples of 16 bytes and no dimension is expanded.

    A fake tensor has no base; only its strides speak, the inner ones first: they decide before one
    that is a multiple of a traced length is asked. A tensor whose last dimension is strided is not
    aligned: it will be copied, and nothing here says what the copy's strides are.
    """
    if x.stride(-1) != 1:
        return False
    if not _is_fake(x) and x.data_ptr() % 16:
        return False
    size = x.element_size()
    return all(
        length == 1 or (stride * size % 16 == 0 and stride > 0)
        for length, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True)
    )


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its last dimension has stride 1, else one contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
