"""Peak device memory of one forward + backward beyond its inputs."""

from __future__ import annotations

import torch

from ..autotune.timing import free_memory
from .family import Work


def peak_bytes(work: Work, device: torch.device) -> int:
    """Bytes that a forward and its backward need at their peak, inputs not counted.

    Outputs, saved statistics, workspaces and gradients count; upstream gradients are inputs.

    Raises:
        ValueError: on a CPU, where torch keeps no such account.
    """
    if device.type != "cuda":
        raise ValueError("peak memory is measured on a GPU; torch keeps no account on a CPU")
    with work.context():
        # Once before, so that compilation and library handles are not on the bill.
        work.backward(work.forward(), retain=False)
        torch.cuda.synchronize(device)
        free_memory(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        gradients = work.backward(work.forward(), retain=False)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del gradients
    return peak
