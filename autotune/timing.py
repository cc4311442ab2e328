"""Timing calls in turn: what the benchmark and sweeps share.

On a GPU calls are replays of CUDA graphs, run round-robin, each between two events. A buffer of
twice the L2 cache may be read before each, outside of the events, so that no run finds its inputs
cached. On a CPU the same rounds are timed by the clock.

Everything runs on the current stream, which must not be the default one: autograd runs a backward
on its forward's stream, and a capture may only meet one.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

Call = Callable[[], object]
Runs = dict[str, list[float]]
clock = time.perf_counter  # of the rounds on a CPU; tests have their own

MIN_ROUNDS, MAX_ROUNDS = 3, 200
# A race: after so many rounds in all, what is slower than the best by the factor stops.
HEATS = ((2, 2.0), (4, 1.3), (8, 1.1))


def first_line(error: BaseException) -> str:
    """An error as one line: its type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip() if text else ''}"[:300]


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A stream that may be captured; the default one may not."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def captured(call: Call, pool: Any = None) -> tuple[Call, object]:
    """A replay of a call that has run before on this stream, and the results that it writes."""
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        results = call()
    return graph.replay, results


def time_calls(
    calls: dict[str, Call],
    *,
    device: torch.device,
    seconds: float,
    cold: bool = False,
    before: Call | None = None,
) -> Runs:
    """Milliseconds of each call, run in turn for about `seconds` in all.

    `cold` reads a buffer through the cache before each run; `before` is run there too, untimed.
    """
    if not calls:
        return {}
    rounds = _Rounds(calls, device, cold, before)
    rounds.run(list(calls))
    total = rounds.first(list(calls))
    return rounds.of(list(calls), min(max(_number(seconds, total), MIN_ROUNDS), MAX_ROUNDS))


def race(
    calls: dict[str, Call],
    *,
    device: torch.device,
    seconds: float,
    keep: Collection[str] = (),
    cold: bool = False,
    before: Call | None = None,
) -> Runs:
    """As `time_calls`, but calls that fall far behind the best stop early; those in `keep` do not.

    The rest of `seconds` goes to the others.
    """
    if not calls:
        return {}
    rounds = _Rounds(calls, device, cold, before)
    alive = list(calls)
    rounds.run(alive)
    runs: Runs = {name: [] for name in calls}
    done = 0
    for heat, factor in HEATS:
        for name, times in rounds.of(alive, heat - done).items():
            runs[name] += times
        done = heat
        medians = {name: statistics.median(runs[name]) for name in alive}
        best = min(medians.values())
        alive = [name for name in alive if name in keep or medians[name] <= factor * best]
    a_round = sum(statistics.median(runs[name]) for name in alive)
    spent = sum(map(sum, runs.values())) / 1e3
    more = min(max(_number(seconds - spent, a_round), 0), MAX_ROUNDS)
    for name, times in rounds.of(alive, more).items():
        runs[name] += times
    return runs


def _number(seconds: float, milliseconds: float) -> int:
    return int(seconds * 1e3 / max(milliseconds, 1e-6))


class _Rounds:
    """Rounds of some calls on one device."""

    def __init__(
        self, calls: dict[str, Call], device: torch.device, cold: bool, before: Call | None
    ) -> None:
        self.calls = calls
        self.one = _events_round if device.type == "cuda" else _clock_round
        steps = [before] if before is not None else []
        if cold and device.type == "cuda":
            steps.append(_flusher(device))
        self.steps = tuple(steps)

    def run(self, names: list[str]) -> dict[str, Callable[[], float]]:
        return self.one(self.calls, names, self.steps)

    def first(self, names: list[str]) -> float:
        """Milliseconds of one round."""
        return sum(read() for read in self.run(names).values())

    def of(self, names: list[str], rounds: int) -> Runs:
        readers: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
        for index in range(rounds):
            # Both directions, so that no contender always follows the same one.
            order = names if index % 2 == 0 else names[::-1]
            for name, read in self.run(order).items():
                readers[name].append(read)
        return {name: [read() for read in reads] for name, reads in readers.items()}


def _clock_round(
    calls: dict[str, Call], order: list[str], steps: tuple[Call, ...]
) -> dict[str, Callable[[], float]]:
    readers: dict[str, Callable[[], float]] = {}
    for name in order:
        for step in steps:
            step()
        start = clock()
        calls[name]()
        elapsed = (clock() - start) * 1e3
        readers[name] = partial(float, elapsed)
    return readers


def _events_round(
    calls: dict[str, Call], order: list[str], steps: tuple[Call, ...]
) -> dict[str, Callable[[], float]]:
    readers: dict[str, Callable[[], float]] = {}
    for name in order:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        for step in steps:
            step()
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
    """Give the memory of finished calls and their graphs back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
