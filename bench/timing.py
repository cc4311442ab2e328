"""Timing contenders in turn, by the rounds of `autotune.timing`.

On a GPU each contender's call is captured in a CUDA graph, so that a ratio rewards faster kernels,
not fewer launches; the host time of an eager call is measured apart. Where a call moves less than
twice the L2 cache, no run finds its inputs cached.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from ..autotune.timing import Call, captured, first_line, time_calls
from .family import Work

WARM_UP = 3
LAUNCHES = 15


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each timed run, and host microseconds of one eager call (None on a CPU)."""

    runs: tuple[float, ...]
    launch_us: float | None = None

    @property
    def median(self) -> float:
        """Median milliseconds."""
        return statistics.median(self.runs)

    def percentile(self, percent: int) -> float:
        """Milliseconds that `percent` of the runs stay under, by nearest rank."""
        ordered = sorted(self.runs)
        return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def time_works(
    works: dict[str, Work], mode: str, *, device: torch.device, seconds: float, cold: bool
) -> dict[str, Timing | str]:
    """Time "fwd" or "bwd" of each work, interleaved, for about `seconds` in all.

    Args:
        works: by contender name.
        mode: "fwd" or "bwd" (gradients alone, of a forward made before).
        device: where the works run.
        seconds: time for the timed rounds, warm-up and capture apart.
        cold: read a buffer through the cache before each run.

    Returns:
        A timing, or the reason why there is none, by contender name.
    """
    calls: dict[str, Call] = {}
    results: dict[str, Timing | str] = {}
    launches: dict[str, float] = {}
    for name, work in works.items():
        try:
            if device.type == "cuda":
                calls[name] = _capture(work, mode)
                launches[name] = _launch_us(work, mode)
            else:
                calls[name] = _eager(work, mode)
        except Exception as error:
            # Ending a broken capture raises too; what broke it is that error's context.
            results[name] = first_line(error.__context__ or error)
            if device.type == "cuda":
                torch.cuda.synchronize()
    runs = time_calls(calls, device=device, seconds=seconds, cold=cold)
    for name, milliseconds in runs.items():
        results[name] = Timing(tuple(milliseconds), launches.get(name))
    return results


def _eager(work: Work, mode: str) -> Call:
    with work.context():
        outputs = work.forward()

    def call() -> object:
        with work.context():
            return work.forward() if mode == "fwd" else work.backward(outputs)

    return call


def _capture(work: Work, mode: str) -> Call:
    """Warm up, then capture one forward, or one backward alone; the call replays it."""
    with work.context():
        for _ in range(WARM_UP):
            outputs = work.forward()
            if mode == "bwd":
                work.backward(outputs)
        replay, kept = captured(work.forward if mode == "fwd" else lambda: work.backward(outputs))

    # The graph reads what the forward saved and writes what the capture returned: both must live.
    def call(alive: object = (outputs, kept)) -> None:
        replay()

    return call


def _launch_us(work: Work, mode: str) -> float:
    """Median host microseconds of one eager call, the device idle before each."""
    samples = []
    with work.context():
        outputs = work.forward()
        for _ in range(LAUNCHES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = work.forward() if mode == "fwd" else work.backward(outputs)
            samples.append((time.perf_counter() - start) * 1e6)
            del result
        torch.cuda.synchronize()
    return statistics.median(samples)
