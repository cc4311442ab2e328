"""Cases of Polar and softmax attention: one small value describes a call and draws its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fastweights import ops, reference
from fastweights.ops import checks
from fastweights.ops.polar_attention.op import (
    AttentionShape,
    Lengths,
    NullParameters,
    attention_shape,
)

from . import inputs

PARAMETERS = ("null_base", "null_slope", "length_gain", "magnitude_gain")


@dataclass(frozen=True)
class Case:
    """One call. Lengths are tokens; `packed` and `packed_k` are lengths of sequences.

    Attributes:
        tq, tk: tokens; `tk` None is `tq`. Packed: all tokens, the rest is padding full of NaN.
        n_keys: "row" is (Tq,), "batch" is (B, Tq); values from −3 to Tk + 5, in no order.
        null_base: mean of the parameter; −20 is no null at all, 10 leaves real mass of 1e-4.
        polar: False is softmax mode, which has no parameters.
        layout: one of `inputs.LAYOUTS`.
    """

    tq: int = 63
    tk: int | None = None
    batch: int = 1
    hq: int = 2
    hk: int = 1
    d: int = 32
    causal: bool = True
    window: int | None = None
    n_keys: str | None = None
    packed: tuple[int, ...] | None = None
    packed_k: tuple[int, ...] | None = None
    null_value: bool = True
    null_base: float = 2.0
    polar: bool = True
    layout: str = "fused"

    @property
    def name(self) -> str:
        """A readable test id."""
        parts = [f"T{self.tq}" if self.tk in (None, self.tq) else f"T{self.tq}x{self.tk}"]
        parts.append(f"B{self.batch}H{self.hq}x{self.hk}D{self.d}")
        parts += ["softmax"] if not self.polar else []
        parts += ["full"] if not self.causal else []
        parts += [f"W{self.window}"] if self.window else []
        parts += [f"n_keys_{self.n_keys}"] if self.n_keys else []
        parts += ["packed"] if self.packed is not None else []
        parts += ["packed_k"] if self.packed_k is not None else []
        parts += ["no_value"] if self.polar and not self.null_value else []
        parts += [f"null{self.null_base:g}"] if self.null_base != 2.0 else []
        parts += [self.layout] if self.layout != "fused" else []
        return "-".join(parts)

    def but(self, **changes: Any) -> Case:
        """The same case with some fields replaced."""
        return replace(self, **changes)

    def longer(self, factor: int) -> Case:
        """The same rules over `factor` times the tokens, one more of them."""

        def scaled(lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
            return None if lengths is None else tuple(factor * n for n in lengths)

        return self.but(
            tq=factor * self.tq + 1,
            tk=None if self.tk is None else factor * self.tk + 1,
            window=None if self.window is None else factor * self.window,
            packed=scaled(self.packed),
            packed_k=scaled(self.packed_k),
        )

    @property
    def keys(self) -> int:
        """Tk."""
        return self.tq if self.tk is None else self.tk

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the call, floating tensors as views of NaN-filled buffers."""
        source = inputs.generator(seed, device)
        kv_shape = (self.batch, self.keys, self.hk, self.d)
        q = inputs.normal((self.batch, self.tq, self.hq, self.d), source, dtype)
        k = inputs.normal(kv_shape, source, dtype)
        v = inputs.normal(kv_shape, source, dtype)
        arguments: dict[str, Any] = {}
        if self.packed is not None:
            arguments["cu_seqlens"] = _offsets(self.packed, device)
            q[:, sum(self.packed) :] = float("nan")
            lengths_k = self.packed
            if self.packed_k is not None:
                lengths_k = self.packed_k
                arguments["cu_seqlens_k"] = _offsets(self.packed_k, device)
            k[:, sum(lengths_k) :] = float("nan")
            v[:, sum(lengths_k) :] = float("nan")
        q, k, v = inputs.lay_out(q, k, v, self.layout)
        arguments |= {"q": q, "k": k, "v": v}
        if self.polar:
            arguments |= self._parameters(source, device)
        if self.n_keys is not None:
            size = (self.tq,) if self.n_keys == "row" else (self.batch, self.tq)
            n = torch.randint(-3, self.keys + 6, size, generator=source, device=device)
            arguments["n_keys"] = n.to(torch.int32)
        if self.window is not None:
            arguments["window"] = self.window
        if not self.causal:
            arguments["causal"] = False
        return arguments

    def _parameters(self, source: torch.Generator, device: torch.device) -> dict[str, Any]:
        """fp32, at the operating point of a fresh layer, a little apart in each head."""
        centers = dict(zip(PARAMETERS, (self.null_base, 0.97, 0.31, 0.2), strict=True))
        drawn = {
            name: inputs.embed(
                center + 0.1 * inputs.normal((self.hq,), source, torch.float32), offset=1
            )
            for name, center in centers.items()
        }
        if self.null_value:
            value = inputs.normal((self.hq, self.d), source, torch.float32, 0.5)
            drawn["null_value"] = inputs.embed(value)
        return drawn

    @property
    def op(self) -> Callable[..., Any]:
        """The public function, with statistics in Polar mode."""
        return with_statistics if self.polar else ops.softmax_attention

    @property
    def reference(self) -> Callable[..., Any]:
        """The literal definition, with statistics in Polar mode."""
        if self.polar:
            return partial(reference.polar_attention, return_stats=True)
        return reference.softmax_attention

    def on_triton(self, **arguments: Any) -> Any:
        """`op` on the Triton backend."""
        return self.op(**arguments, backend="triton")

    def for_form(self, single: int) -> Case:
        """As one form of Triton's backward takes it: `single` has no null value."""
        return self.but(null_value=False) if single else self

    def measurable(self, dtype: torch.dtype) -> bool:
        """Whether 16-bit numbers carry what backward takes of them.

        Gs = w_R·∂loss/∂s, and w_R is about e^−null_base: at 10 Gs lies below fp16's smallest
        normal number, 6e-5, and loses its digits in any implementation that multiplies fp16.

        Softmax mode forms Σ g·out of the rounded out, as every FlashAttention does. With a handful
        of keys a row's scores have gradients as small as that error: over two keys dq is off by
        three times what plain torch is, over seven by no more than the rest.
        """
        if dtype.itemsize == 2 and not self.polar and 1 < self.keys < 7:
            return False
        return dtype != torch.float16 or self.null_base < 10.0

    def shape(self, dtype: torch.dtype, device: torch.device) -> AttentionShape:
        """What backends and config spaces see of this call."""
        return shape_of(self.arguments(0, dtype, device))


def with_statistics(**arguments: Any) -> Any:
    """`polar_attention` with its statistics."""
    return ops.polar_attention(**arguments, return_stats=True)


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    starts = torch.tensor((0, *lengths)).cumsum(0)
    return starts.to(torch.int32).to(device)


def shape_of(arguments: dict[str, Any]) -> AttentionShape:
    """The shape of a call from its keyword arguments."""
    null = None
    if "null_base" in arguments:
        null = NullParameters(
            arguments.get("null_value"), *(arguments[name] for name in PARAMETERS)
        )
    lengths = Lengths(*(arguments.get(n) for n in ("n_keys", "cu_seqlens", "cu_seqlens_k")))
    qkv = [arguments[name] for name in "qkv"]
    shape = attention_shape(
        "test", *qkv, null, lengths,
        arguments.get("scale"), arguments.get("causal", True), arguments.get("window"),
        arguments.get("max_seqlen"), arguments.get("max_seqlen_k"),
    )  # fmt: skip
    return replace(shape, aligned=all(map(checks.aligned, qkv)))


def operator_arguments(arguments: dict[str, Any], backend: str = "auto") -> tuple[Any, ...]:
    """The positional arguments of `torch.ops.fastweights.{polar,softmax}_attention_fwd`."""
    shape = shape_of(arguments)
    null = ()
    if shape.polar:
        null = (arguments.get("null_value"), *(arguments[name] for name in PARAMETERS))
    return (
        arguments["q"], arguments["k"], arguments["v"], *null, arguments.get("n_keys"),
        arguments.get("cu_seqlens"), arguments.get("cu_seqlens_k"), shape.scale, shape.causal,
        shape.window, shape.max_seqlen, shape.max_seqlen_k, backend,
    )  # fmt: skip


def check_row_identity(
    case: Case, dtype: torch.dtype, device: torch.device, tolerance: float, **options: Any
) -> None:
    """Adding a constant to all logits of a row changes nothing, for any upstream gradient.

    With q[..., D−1] = 1 the last column of k is such a constant, the null's base another, so for
    each KV head √D·Σ_j dk[:, j, h_k, D−1] + Σ_{h in group} d null_base[h] = 0. `tolerance` is
    relative to the sum of absolute values.
    """
    from .contracts import leaves, random_upstream
    from .oracle import named

    arguments = leaves(case.arguments(3, dtype, device))
    with torch.no_grad():
        arguments["q"][..., -1] = 1.0
    results = named(case.op(**arguments, **options))
    upstream = random_upstream(results, seed=5)
    dk, d_base = torch.autograd.grad(
        [results[name] for name in upstream],
        [arguments["k"], arguments["null_base"]],
        list(upstream.values()),
    )
    column = case.d**0.5 * dk[..., -1].double()
    base = d_base.double().view(case.hk, -1)
    defect = (column.sum((0, 1)) + base.sum(1)).abs()
    size = column.abs().sum((0, 1)) + base.abs().sum(1)
    worst = float((defect / size.clamp(min=1e-30)).max())
    assert worst <= tolerance, f"{case.name}: row identity off by {worst:.2e} of the terms"


# What a kernel can get wrong: each rule of visibility, each input form, each size near a tile's.
RULES = (
    Case(),
    Case(tq=65, d=64, hq=4, hk=2, layout="transposed"),
    Case(tq=64, d=40, layout="odd_stride"),
    Case(tq=127, d=96, layout="misaligned", hq=1),
    Case(tq=1),
    Case(tq=7, hq=4, hk=2, batch=2),
    Case(tq=100, window=33),
    Case(tq=70, window=1),
    Case(tq=66, window=500, layout="contiguous"),
    Case(tq=20, tk=90, batch=2),
    Case(tq=90, tk=20),
    Case(tq=37, tk=101, window=16),
    Case(tq=45, tk=77, causal=False, hq=4),
    Case(tq=77, tk=45, causal=False, window=20),
    Case(tq=50, tk=70, n_keys="row", batch=2),
    Case(tq=50, tk=70, n_keys="batch", batch=2, window=24),
    Case(tq=130, packed=(1, 0, 37, 64, 0, 20)),
    Case(tq=130, packed=(1, 0, 37, 64, 0, 20), causal=False, window=19, hq=1),
    Case(tq=60, tk=80, packed=(5, 0, 33, 10), packed_k=(20, 7, 33, 0)),
    Case(tq=60, packed=(23, 37), n_keys="row"),
    Case(tq=20, packed=()),
    Case(tq=65, null_value=False),
    Case(tq=65, null_base=-20.0),
    Case(tq=65, null_base=6.0),
    Case(tq=65, null_base=10.0),
    Case(tq=65, null_base=10.0, null_value=False),
    Case(tq=5, tk=0),
)
SOFTMAX_RULES = (
    Case(tq=65, d=64, hq=4, hk=2, polar=False),
    Case(tq=1, polar=False),
    Case(tq=90, tk=20, polar=False, layout="transposed"),
    Case(tq=66, window=20, polar=False),
    Case(tq=50, tk=70, n_keys="row", polar=False),
    Case(tq=100, packed=(1, 0, 37, 50), polar=False),
)
