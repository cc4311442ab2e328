"""What is timed: sizes, contenders, peers and the ratios a case has to reach.

`forward` is the training forward (inputs require grad, statistics for backward are saved);
`backward` is the gradient of all inputs, parameters included, without the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..ops import flops

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
MODES = ("fwd", "bwd", "memory")
SUITES = ("quick", "headline", "extra", "all")
GPU_PEERS = ("sdpa-cudnn", "sdpa-flash", "flex", "fa4")
SDPA_PEERS = ("sdpa-cudnn", "sdpa-flash")


@dataclass(frozen=True)
class Target:
    """A ratio that a contender has to reach against another contender of the same case.

    Attributes:
        mode: "fwd" or "bwd".
        against: name of the other contender.
        floor, good, aim: the three marks; None where there is none.
        contender: the one that is judged.
        measure: "speed" (ms of the other ÷ ms) and "rate" (TFLOP/s ÷ TFLOP/s of the other) have
            to be at least the mark; "time" (ms ÷ ms of the other) and "time/flop" at most.
    """

    mode: str
    against: str
    floor: float
    good: float | None = None
    aim: float | None = None
    contender: str = "polar"
    measure: str = "speed"

    @property
    def lower_is_better(self) -> bool:
        """Whether the ratio has to stay under the marks."""
        return self.measure.startswith("time")


@dataclass(frozen=True)
class Case:
    """Sizes and rules of one attention call, and what it is timed beside.

    Attributes:
        name: unique, readable.
        suites: "quick", "headline" or "extra"; a case may be in several.
        batch, tokens, heads_q, heads_k, head_dim: B, T, Hq, Hk, D.
        dtype: key of `DTYPES`.
        window: sliding window, or None.
        sequences: number of equal packed sequences along T (then batch is 1), or None.
        modes: of "fwd", "bwd", "memory".
        contenders: our own calls, by their names in `ours.py`.
        peers: other libraries' calls, by their names in `peers.py`; the first that runs is the
            one that every row's ratio is taken to.
        relatives: our Polar call on other sizes, timed in the same turn: (label, case).
        targets: ratios to reach.
        device: "cuda" or "cpu".
        op: the op family, for selecting on the command line.
    """

    name: str
    suites: tuple[str, ...]
    batch: int
    tokens: int
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: str = "bf16"
    window: int | None = None
    sequences: int | None = None
    modes: tuple[str, ...] = ("fwd", "bwd")
    contenders: tuple[str, ...] = ("polar", "softmax")
    peers: tuple[str, ...] = SDPA_PEERS
    relatives: tuple[tuple[str, Case], ...] = ()
    targets: tuple[Target, ...] = ()
    device: str = "cuda"
    op: str = "polar_attention"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return DTYPES[self.dtype]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_k

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.tokens // (self.sequences or 1)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        pairs = flops.visible_pairs(self.length, self.length, causal=True, window=self.window)
        pairs *= self.batch * (self.sequences or 1)
        count = flops.attention_forward if mode == "fwd" else flops.attention_backward
        return count(pairs, self.head_dim, self.heads_q)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes: each operand read once, each result written once.

        Forward reads q, k, v and writes out; backward reads q, k, v, out and its gradient and
        writes three gradients. The per-row statistics, 1/D of an operand each, are left out.
        """
        q = self.batch * self.tokens * self.heads_q * self.head_dim * self.torch_dtype.itemsize
        kv = 2 * q // self.group
        return 2 * q + kv if mode == "fwd" else 4 * q + 2 * kv

    def sizes(self) -> dict[str, int | str | None]:
        """What a record keeps of the case."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "Hq": self.heads_q,
            "Hk": self.heads_k,
            "D": self.head_dim,
            "dtype": self.dtype,
            "window": self.window,
            "sequences": self.sequences,
        }

    def small(self) -> Case:
        """The same rules at a size whose float64 reference is cheap, with ragged lengths."""
        limit = 1000 if self.device == "cuda" else 200
        heads_k = min(self.heads_k, 4)
        sequences = None if self.sequences is None else min(self.sequences, 3)
        length = min(self.length, limit // (sequences or 1))
        window = None if self.window is None else min(self.window, max(length // 3, 1))
        return replace(
            self,
            batch=1,
            tokens=length * (sequences or 1),
            heads_k=heads_k,
            heads_q=heads_k * self.group,
            window=window,
            sequences=sequences,
        )


Marks = tuple[float, float, float]


def _against_cudnn(fwd: Marks, bwd: Marks) -> tuple[Target, ...]:
    return tuple(
        Target(mode, "sdpa-cudnn", floor, good, aim)
        for mode, (floor, good, aim) in (("fwd", fwd), ("bwd", bwd))
    )


# What the count and the null may cost over the same kernel without them.
_COUNT = (
    Target("fwd", "softmax", 1.04, 1.02, 1.01, measure="time"),
    Target("bwd", "softmax", 1.08, 1.05, 1.03, measure="time"),
)


def _gpu_cases() -> list[Case]:
    d128 = Case(
        "d128-t8k", ("quick", "headline"), 4, 8192, 16, 16, 128, peers=GPU_PEERS,
        targets=_against_cudnn((0.80, 0.88, 1.00), (0.65, 0.75, 0.90)) + _COUNT,
    )  # fmt: skip
    d64 = replace(
        d128, name="d64-t8k", suites=("headline",), head_dim=64,
        targets=_against_cudnn((0.88, 0.95, 1.05), (0.75, 0.85, 0.95)) + _COUNT,
    )  # fmt: skip
    short = replace(
        d128, name="d128-t2k", suites=("quick", "headline"), batch=16, tokens=2048,
        targets=_against_cudnn((0.70, 0.80, 0.95), (0.50, 0.65, 0.85)) + _COUNT,
    )  # fmt: skip
    long = replace(
        d128, name="d128-t16k", suites=("headline",), batch=2, tokens=16384,
        peers=("sdpa-cudnn", "sdpa-flash", "fa4"), targets=_COUNT,
    )  # fmt: skip
    gqa = replace(
        d128, name="gqa-d128-t8k", suites=("headline",), heads_k=4,
        relatives=(("16 heads", d128),),
        targets=tuple(Target(mode, "polar, 16 heads", 1.0) for mode in ("fwd", "bwd")) + _COUNT,
    )  # fmt: skip
    window = replace(
        d128, name="window-d128-t8k", suites=("extra",), window=1024, peers=("flex", "fa4"),
        relatives=(("no window", d128),),
        targets=tuple(Target(mode, "polar, no window", 3.0) for mode in ("fwd", "bwd")),
    )  # fmt: skip
    rows = replace(d128, name="dense-d128-8x1k", batch=8, tokens=1024)
    packed = replace(
        d128, name="packed-d128-8x1k", suites=("extra",), batch=1, tokens=8192, sequences=8,
        peers=("flex",), relatives=(("dense", rows),),
        targets=tuple(Target(mode, "polar, dense", 0.85) for mode in ("fwd", "bwd")),
    )  # fmt: skip
    odd = [
        replace(
            d128, name=f"d{width}-t8k", suites=("extra",), head_dim=width,
            contenders=("polar",), peers=SDPA_PEERS, relatives=(("D=128", d128),),
            targets=tuple(
                Target(mode, "polar, D=128", 1.45, measure="time/flop") for mode in ("fwd", "bwd")
            ),
        )
        for width in (96, 192)
    ]  # fmt: skip
    single = replace(
        d128, name="fp32-d128-t2k", suites=("extra",), batch=1, tokens=2048, heads_q=8, heads_k=8,
        dtype="fp32", peers=("torch", "torch-polar"),
        targets=(Target("fwd", "torch-polar", 3.0),),
    )  # fmt: skip
    deterministic = replace(
        d128, name="deterministic-d128-t8k", suites=("extra",), modes=("bwd",),
        contenders=("polar", "polar-deterministic"), peers=SDPA_PEERS,
        targets=(
            Target(
                "bwd", "polar", 1.35, 1.25, 1.15, contender="polar-deterministic", measure="time"
            ),
        ),
    )  # fmt: skip
    half = replace(
        d128, name="fp16-d128-t8k", suites=("extra",), dtype="fp16", contenders=("polar",),
        peers=SDPA_PEERS, targets=(),
    )  # fmt: skip
    memory = replace(
        d128, name="memory-d128-t32k", suites=("extra",), batch=1, tokens=32768,
        modes=("memory",), peers=SDPA_PEERS, targets=(),
    )  # fmt: skip
    return [
        d128, d64, short, long, gqa, window, packed, *odd, single, deterministic, half, memory,
    ]  # fmt: skip


def _cpu_cases() -> list[Case]:
    base = Case(
        "cpu-d64-t256", ("quick",), 1, 256, 2, 2, 64, dtype="fp32", peers=("sdpa",), device="cpu"
    )
    d64 = replace(base, name="cpu-d64-t1k", suites=("headline",), tokens=1024, heads_q=4, heads_k=4)
    return [
        base,
        d64,
        replace(d64, name="cpu-d128-t1k", head_dim=128),
        replace(d64, name="cpu-gqa-d64-t1k", heads_k=1),
        replace(
            d64, name="cpu-window-d64-t1k", suites=("extra",), window=128, peers=(),
            relatives=(("no window", d64),),
        ),
        replace(
            d64, name="cpu-packed-d64-4x256", suites=("extra",), sequences=4, peers=(),
            relatives=(("dense", replace(d64, batch=4, tokens=256)),),
        ),
    ]  # fmt: skip


CASES = {case.name: case for case in (*_gpu_cases(), *_cpu_cases())}


def select(
    device: str,
    *,
    suite: str | None = None,
    names: Sequence[str] = (),
    ops: Sequence[str] = (),
    dtype: str | None = None,
    modes: Sequence[str] = MODES,
) -> list[Case]:
    """The cases to run, in the order of the list.

    Args:
        device: "cuda" or "cpu".
        suite: one of `SUITES`; None is "headline" on a GPU and "all" on a CPU.
        names: run these instead of a suite.
        ops: keep these op families; none given keeps all.
        dtype: run every case in this dtype instead of its own.
        modes: keep these modes; cases left with none are dropped.

    Raises:
        ValueError: an unknown name, op or dtype, or a case of another device.
    """
    families = {case.op for case in CASES.values()}
    for op in ops:
        if op not in families:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(sorted(families))}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    here = [case for case in CASES.values() if case.device == device]
    for name in names:
        if name not in CASES:
            raise ValueError(
                f"unknown case {name!r}; on {device}: {', '.join(c.name for c in here)}"
            )
        if CASES[name].device != device:
            raise ValueError(f"case {name!r} is for {CASES[name].device}, this run is on {device}")
    if names:
        here = [CASES[name] for name in names]
    else:
        wanted = suite or ("headline" if device == "cuda" else "all")
        here = [case for case in here if wanted == "all" or wanted in case.suites]
    chosen = []
    for case in here:
        kept = tuple(mode for mode in case.modes if mode in modes)
        if kept and (not ops or case.op in ops):
            case = replace(case, modes=kept)
            chosen.append(case if dtype in (None, case.dtype) else _in_dtype(case, str(dtype)))
    return chosen


def _in_dtype(case: Case, dtype: str) -> Case:
    # The marks were set for the case's own dtype.
    relatives = tuple((label, replace(other, dtype=dtype)) for label, other in case.relatives)
    return replace(case, name=f"{case.name}-{dtype}", dtype=dtype, relatives=relatives, targets=())
