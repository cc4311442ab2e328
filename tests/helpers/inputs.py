"""Awkward but legal inputs: views cut from larger buffers whose other memory is NaN.

A kernel that reads past an end, forgets a stride or assumes alignment then shows it as NaN or as a
wrong number. Tests use these by default; contiguous tensors are one layout among others.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

TAIL = 128  # rows of NaN behind the tokens: as long as the largest tile
ALIGNED = 8  # elements behind the last dimension; 16 bytes in 16-bit types, 32 in fp32

LAYOUTS = ("fused", "transposed", "contiguous", "misaligned", "odd_stride")


def generator(seed: int, device: torch.device) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device).manual_seed(seed)


def normal(
    shape: tuple[int, ...], source: torch.Generator, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Standard normal numbers times `scale`, rounded to `dtype`."""
    return (scale * torch.randn(shape, generator=source, device=source.device)).to(dtype)


def embed(x: torch.Tensor, *, pad: int = ALIGNED, offset: int = 0, tail: int = 1) -> torch.Tensor:
    """A view equal to `x` with NaN all around it.

    Args:
        x: any floating tensor with at least one dimension.
        pad: elements between the rows of the last dimension. 1 makes the strides odd.
        offset: elements in front. 1 makes the base address no multiple of 16 bytes.
        tail: rows behind each of the other dimensions; dimension 1 of a (B, T, H, D) tensor
            gets `TAIL` of them when `tail` is `TAIL`.
    """
    sizes = [n + (tail if i == 1 and x.ndim == 4 else 1) for i, n in enumerate(x.shape[:-1])]
    sizes.append(x.shape[-1] + pad)
    whole = 1
    for n in sizes:
        whole *= n
    buffer = torch.full((whole + offset,), float("nan"), dtype=x.dtype, device=x.device)
    view = buffer[offset:].view(sizes)[tuple(slice(0, n) for n in x.shape)]
    view.copy_(x)
    return view


def spaced(x: torch.Tensor) -> torch.Tensor:
    """A view equal to `x` whose last dimension is not contiguous, NaN in between."""
    buffer = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., 0] = x
    return buffer[..., 0]


def lay_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same q, k, v (each (B, T, H, D), contiguous) as views of the named layout.

    "fused": all three (k and v if lengths differ) are slices of one projection's result;
    "transposed": stored (B, H, T, D); "misaligned": base address off by one element;
    "odd_stride": strides no multiple of 16 bytes; "contiguous": as they are.
    """
    if layout == "contiguous":
        return q, k, v
    if layout == "transposed":
        return tuple(_transposed(x) for x in (q, k, v))  # type: ignore[return-value]
    if layout == "misaligned":
        return tuple(embed(x, offset=1, tail=TAIL) for x in (q, k, v))  # type: ignore[return-value]
    if layout == "odd_stride":
        return tuple(embed(x, pad=1, tail=TAIL) for x in (q, k, v))  # type: ignore[return-value]
    if layout != "fused":
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    hq, hk = q.shape[2], k.shape[2]
    if q.shape[1] == k.shape[1]:
        fused = embed(torch.cat([q, k, v], dim=2), tail=TAIL)
        return fused[:, :, :hq], fused[:, :, hq : hq + hk], fused[:, :, hq + hk :]
    fused = embed(torch.cat([k, v], dim=2), tail=TAIL)
    return embed(q, tail=TAIL), fused[:, :, :hk], fused[:, :, hk:]


def _transposed(x: torch.Tensor) -> torch.Tensor:
    batch, tokens, heads, width = x.shape
    shape = (batch, heads, tokens + TAIL, width + ALIGNED)
    buffer = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    view = buffer[:, :, :tokens, :width].transpose(1, 2)
    view.copy_(x)
    return view


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU in front of a page that nobody may read: who does, crashes."""
    length = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.mprotect(ctypes.c_void_p(address + length), mmap.PAGESIZE, 0)
    assert refused == 0, ctypes.get_errno()
    flat = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=length - x.nbytes)
    flat.copy_(x.flatten())
    return flat.view(x.shape)
