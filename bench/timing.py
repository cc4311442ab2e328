"""Timing contenders in turn.

On a GPU each contender's call is captured in a CUDA graph, so that a ratio rewards faster kernels,
not fewer launches; graphs are replayed round-robin, each between two events, and the host time of
an eager call is measured apart. Where a call moves less than twice the L2 cache, a buffer of that
size is read before each replay, outside of the events, so that no run finds its inputs cached. On
a CPU the same rounds are timed by the clock.

Everything runs on the current stream, which must not be the default one: autograd runs a backward
on its forward's stream, and a capture may only meet one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .family import Work

WARM_UP = 3
MIN_ROUNDS, MAX_ROUNDS = 3, 200
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


Call = Callable[[], object]


def first_line(error: BaseException) -> str:
    """An error as one line: its type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip() if text else ''}"[:300]


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


def time_calls(
    calls: dict[str, Call], *, device: torch.device, seconds: float, cold: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each call, run in turn for about `seconds` in all."""
    if not calls:
        return {}
    one_round = _events_round if device.type == "cuda" else _clock_round
    flush = _flusher(device) if cold and device.type == "cuda" else None
    one_round(calls, list(calls), flush)
    first = one_round(calls, list(calls), flush)
    total = sum(read() for read in first.values())
    rounds = min(max(int(seconds * 1e3 / max(total, 1e-6)), MIN_ROUNDS), MAX_ROUNDS)
    readers: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for index in range(rounds):
        # Both directions, so that no contender always follows the same one.
        order = list(calls) if index % 2 == 0 else list(reversed(calls))
        for name, read in one_round(calls, order, flush).items():
            readers[name].append(read)
    return {name: [read() for read in reads] for name, reads in readers.items()}


# ---- CPU ----------------------------------------------------------------------------------------


def _eager(work: Work, mode: str) -> Call:
    with work.context():
        outputs = work.forward()

    def call() -> object:
        with work.context():
            return work.forward() if mode == "fwd" else work.backward(outputs)

    return call


def _clock_round(
    calls: dict[str, Call], order: list[str], flush: Call | None
) -> dict[str, Callable[[], float]]:
    readers: dict[str, Callable[[], float]] = {}
    for name in order:
        start = time.perf_counter()
        calls[name]()
        elapsed = (time.perf_counter() - start) * 1e3
        readers[name] = lambda elapsed=elapsed: elapsed  # type: ignore[misc]
    return readers


# ---- GPU ----------------------------------------------------------------------------------------


def _capture(work: Work, mode: str) -> Call:
    """Warm up, then capture one forward, or one backward alone; the call replays it."""
    stream = torch.cuda.current_stream()
    with work.context():
        for _ in range(WARM_UP):
            outputs = work.forward()
            if mode == "bwd":
                work.backward(outputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = work.forward() if mode == "fwd" else work.backward(outputs)

    # The graph reads what the forward saved and writes what the capture returned: both must live.
    def replay(alive: object = (outputs, kept)) -> None:
        graph.replay()

    return replay


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


def _events_round(
    calls: dict[str, Call], order: list[str], flush: Call | None
) -> dict[str, Callable[[], float]]:
    readers: dict[str, Callable[[], float]] = {}
    for name in order:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if flush is not None:
            flush()
        start.record()
        calls[name]()
        end.record()

        def read(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> float:
            end.synchronize()
            return start.elapsed_time(end)

        readers[name] = read
    return readers


def l2_bytes(device: torch.device) -> int:
    """Size of a GPU's L2 cache; 0 on a CPU, whose caches the rounds do not manage."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).L2_cache_size


def _flusher(device: torch.device) -> Call:
    # Read, not written: dirty lines would be written back inside the timed region.
    buffer = torch.zeros(2 * l2_bytes(device) // 4, dtype=torch.float32, device=device)
    return buffer.sum


def free_memory(device: torch.device) -> None:
    """Give the memory of finished contenders and their graphs back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
