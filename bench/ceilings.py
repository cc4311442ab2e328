"""What this machine reaches in this run: a large copy and large matmuls, on random data."""

from __future__ import annotations

import torch

from ..autotune.timing import free_memory, time_calls
from ..ops import flops
from .cases import DTYPES


def copy_gbps(device: torch.device, seconds: float = 0.3) -> float:
    """GB/s of `y.copy_(x)`, bytes read plus bytes written: 2 GiB on a GPU, 64 MiB on a CPU."""
    size = (2 << 30) if device.type == "cuda" else (64 << 20)
    x = torch.randn(size // 4, device=device)
    y = torch.empty_like(x)
    runs = time_calls({"copy": lambda: y.copy_(x)}, device=device, seconds=seconds)["copy"]
    return 2 * size / _median(runs) / 1e6


def matmul_tflops(device: torch.device, dtype: str, n: int, seconds: float = 0.3) -> float:
    """TFLOP/s of one n × n × n `torch.matmul` in `dtype`."""
    a = torch.randn(n, n, device=device, dtype=DTYPES[dtype])
    b = torch.randn(n, n, device=device, dtype=DTYPES[dtype])
    out = torch.empty_like(a)
    runs = time_calls(
        {"matmul": lambda: torch.matmul(a, b, out=out)}, device=device, seconds=seconds
    )["matmul"]
    return flops.matmul(n, n, n) / _median(runs) / 1e9


def measure(device: torch.device, dtypes: set[str]) -> dict[str, object]:
    """Copy bandwidth and, for each dtype that is timed, matmul rates by size.

    Returns:
        {"copy_gbps": float, "matmul_tflops": {dtype: {"4096": float, …}}}
    """
    sizes = (4096, 8192) if device.type == "cuda" else (1024,)
    rates = {}
    for dtype in sorted(dtypes):
        # 8192³ in fp32 or fp64 takes too long to say anything new.
        wide = sizes if dtype in ("bf16", "fp16") else sizes[:1]
        rates[dtype] = {str(n): matmul_tflops(device, dtype, n) for n in wide}
    found = {"copy_gbps": copy_gbps(device), "matmul_tflops": rates}
    free_memory(device)
    return found


def _median(runs: list[float]) -> float:
    return sorted(runs)[len(runs) // 2]
