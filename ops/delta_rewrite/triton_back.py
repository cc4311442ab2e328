"""Triton backend: the launchers of the backward in parallel mode; kernels in
`triton_back_kernels`, which see a memory in tiles.

Without an echo A' is formed again, in the dtype of its products, and the gradient behind the reads
goes through memory: both are read by products over columns, which no block of columns has alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...autotune.space import Config, Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from .op import RewriteShape, RewriteTensors
from .triton_back_spaces import BACK_KERNELS, OP, SPACE_BACK, SPACE_BACK_READS, bucket

ROWS = Config.make(4, 1, "fma", R=16, K=64)  # of x and features at a time
GRADIENTS = Config.make(4, 1, "fma", R=4, K=64)
SUMS = Config.make(8, 1, "fma", T=128, K=16)
WAVES = 2  # of programs that each have some of the columns


def bwd(
    shape: RewriteShape,
    d_y: Tensor,
    d_state: Tensor,
    d_normalizer: Tensor,
    given: RewriteTensors,
    change: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of k, v, beta, state, normalizer and q; None if there are no queries.

    `change` is E if it was saved.
    """
    return Back(shape, given, change).run(d_y, d_state, d_normalizer)


def rebuild(shape: RewriteShape, given: RewriteTensors, change: Tensor) -> Tensor:
    """The state before a call, from the one behind it, which stands in its place in `given`.

    The same products as in the forward, and as exact: what is taken off is what was added.
    """
    back = Back(shape, given, change)
    back.describe_keys()
    before = back.like_state()
    precision = runtime.precision(torch.float32, shape.device)
    if shape.sequential and shape.tokens > 1 and precision == "tf32":
        precision = "bf16x6"  # tokens one after another are written without tensor cores
    back.of_tokens(
        given.state, given.beta, change, before, minus=True, zero=True, precision=precision
    )
    return before


def describe_alone(shape: RewriteShape, k: Tensor) -> tuple[Tensor, Tensor]:
    """φ(k) (B·H, M, P) and ‖φ(k)‖² + eps_norm (B·H, M) in fp32, whatever the memory holds."""
    rows = _Rows(shape, k, torch.float32)
    # Without denominators nothing of a memory is looked at; k stands in its place.
    _describe(replace(shape, denominator=False), rows, k, {"first": None, "heads": shape.heads})
    return rows.features, rows.size


def _describe(
    shape: RewriteShape, rows: _Rows, normalizer: Tensor, common: dict[str, Any], *,
    keys: bool = True, first: bool = False,
) -> None:  # fmt: skip
    """`first`: nothing is in the memories of rows that are."""
    tiles = -(-rows.count // ROWS["R"])
    arguments = common | rows.arguments | {
        "normalizer": normalizer, "features": rows.features, "inverse": rows.inverse,
        "gamma": rows.gamma, "found": rows.found, "size": rows.size,
        "tiles": tiles, "eps": shape.eps, "eps_norm": shape.eps_norm,
        **strides("z", normalizer, "bh"),
    }  # fmt: skip
    constants = {
        "KEYS": keys,
        "FIRST": first,
        "NORMALIZE": shape.normalize,
        "DENOMINATOR": shape.denominator,
        "CORRECTION": shape.correction,
        "WIDTH": shape.width,
        "WIDE": shape.wide,
        "W": runtime.padded(shape.width),
        "R": ROWS["R"],
        "K": ROWS["K"],
    }
    programs = tiles * shape.batch * shape.heads
    kernel = BACK_KERNELS, "describe"
    runtime.launch(OP, kernel, programs, shape.device, ROWS, arguments, constants)


def strides(letter: str, x: Tensor, axes: str) -> dict[str, int]:
    """Of the leading dimensions of x, as kernels call them."""
    return {f"stride_{letter}{axis}": x.stride(dim) for dim, axis in enumerate(axes)}


class _Rows:
    """Keys or queries: what `describe` leaves of them."""

    def __init__(self, shape: RewriteShape, x: Tensor, kind: torch.dtype) -> None:
        def fresh(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return empty(size, dtype=dtype, device=shape.device)

        self.x, self.count = last_contiguous(x), x.shape[1]
        rows = shape.batch * shape.heads, self.count
        self.features = fresh(*rows, shape.wide, dtype=kind)
        self.units, self.factors, self.inverse = (fresh(*rows) for _ in range(3))
        self.gamma, self.found, self.size, self.weights = (fresh(*rows) for _ in range(4))

    @property
    def arguments(self) -> dict[str, Any]:
        """What kernels of rows take of them."""
        found = {
            "x": self.x, "units": self.units, "factors": self.factors, "count": self.count
        }  # fmt: skip
        return found | strides("x", self.x, "bmh")


class Back:
    """One call's tensors as the kernels take them, and its launches."""

    def __init__(self, shape: RewriteShape, given: RewriteTensors, change: Tensor | None) -> None:
        self.shape, self.given, self.device = shape, given, shape.device
        self.heads = shape.batch * shape.heads
        self.first = None if given.first is None else given.first.contiguous().view(torch.int8)
        self.arguments: dict[str, Any] = {"first": self.first, "heads": shape.heads}
        self.held = self.first is not None
        self.change = change
        self.echo = change is not None
        self.state, self.normalizer = map(last_contiguous, (given.state, given.normalizer))
        self.beta = last_contiguous(given.beta) if shape.channels else given.beta
        here = Device.of(self.device)
        self.config = choose(SPACE_BACK, bucket(shape), here) if shape.tokens else ROWS
        if shape.tokens:
            # With an echo the products are those of the forward, which took fp32.
            kind = torch.float32 if self.echo else shape.dtype
            self.keys = _Rows(shape, given.k, kind)
        if shape.reads and given.q is not None:
            self.read_config = choose(SPACE_BACK_READS, bucket(shape), here)
            self.queries = _Rows(shape, given.q, shape.dtype)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Where results go."""
        return empty(size, dtype=dtype, device=self.device)

    def like_state(self) -> Tensor:
        """(B, H, P, Dv) in fp32."""
        return self.empty(*self.shape.state)

    def launch(
        self, kernel: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        """Run a kernel of the backward."""
        runtime.launch(
            OP, (BACK_KERNELS, kernel), programs, self.device, config, self.arguments | arguments,
            constants,
        )  # fmt: skip

    @property
    def precision(self) -> str:
        """Of products in fp32: TF32 keeps more than elements of 16 bits do."""
        kind = self.shape.dtype
        if self.device.type == "cpu" or kind == torch.float32:
            return runtime.precision(torch.float32, self.device)
        return "tf32"

    # ---- the whole of it ------------------------------------------------------------------------

    def run(self, d_y: Tensor, d_state: Tensor, d_normalizer: Tensor) -> tuple[Tensor | None, ...]:
        """All gradients, of tokens that are written in parallel."""
        shape, given = self.shape, self.given
        k, v, beta, q = given.k, given.v, given.beta, given.q
        d_k, d_v, d_beta = (
            empty(x.shape, dtype=x.dtype, device=self.device) for x in (k, v, beta)
        )  # fmt: skip
        d_q = None if q is None else empty(q.shape, dtype=q.dtype, device=self.device)
        reads = shape.reads > 0
        if not (shape.tokens or reads):
            return d_k, d_v, d_beta, *map(torch.zeros_like, given[3:5]), d_q
        behind, after = self.state, self.normalizer
        if shape.tokens:
            self.describe_keys()
            if self.change is None:
                self.look_up()
            assert self.change is not None
            d_state, d_normalizer = map(last_contiguous, (d_state, d_normalizer))
            if reads:
                behind = self.empty(*shape.state, dtype=shape.dtype)
                self.of_tokens(self.state, self.beta, self.change, behind)
                if shape.denominator:
                    after = self.empty(*shape.state[:3])
                    weights = self.keys.gamma
                    self.add(self.keys, weights, self.normalizer, after, held=self.held)
        if reads:
            d_y = last_contiguous(d_y)
            d_state, d_normalizer = self.through_reads(
                d_y, behind, after, d_state, d_normalizer, d_q
            )
        if not shape.tokens:
            return d_k, d_v, d_beta, d_state, d_normalizer, d_q
        upstream, shares = self.through_values(d_state, d_v, d_beta)
        d_before = self.like_state()
        weights = self.keys.inverse
        gate = weights.view(shape.batch, shape.heads, shape.tokens).transpose(1, 2)
        self.of_tokens(d_state, gate, upstream, d_before, minus=True, zero=True)
        self.through_keys(upstream, d_state, d_normalizer, shares, d_k, d_beta)
        d_z = self.empty(*shape.state[:3])
        self.add(
            self.keys if shape.denominator else None, self.keys.weights, d_normalizer, d_z,
            zero=self.held,
        )  # fmt: skip
        return d_k, d_v, d_beta, d_before, d_z, d_q

    # ---- rows -----------------------------------------------------------------------------------

    def describe_keys(self) -> None:
        """φ of keys, and what each of them has met."""
        _describe(self.shape, self.keys, self.normalizer, self.arguments, first=self.held)

    def add(
        self, rows: _Rows | None, weights: Tensor, base: Tensor | None, out: Tensor, *,
        held: bool = False, zero: bool = False,
    ) -> None:  # fmt: skip
        """out = base + φ(rows)ᵀ weights; without rows the base alone."""
        shape = self.shape
        parts = -(-shape.wide // SUMS["K"])
        taken = (self.keys if rows is None else rows).arguments
        if rows is None:
            taken = taken | {"count": 0}
        arguments = taken | {
            "weights": weights, "base": base, "out": out, "parts": parts,
            **strides("z", out if base is None else base, "bh"),
        }  # fmt: skip
        constants = {
            "BASED": base is not None,
            "HELD": held,
            "ZERO": zero,
            "WIDTH": shape.width,
            "WIDE": shape.wide,
            "T": SUMS["T"],
            "K": SUMS["K"],
        }
        self.launch("add_rows", parts * self.heads, SUMS, arguments, constants)

    # ---- reads ----------------------------------------------------------------------------------

    def through_reads(
        self, d_y: Tensor, behind: Tensor, after: Tensor, d_state: Tensor, d_normalizer: Tensor,
        d_q: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gradients of A' and z' with those of the reads; that of q is written.

        `behind` and `after` are A' and z'. Without tokens they are those that came with the call.
        """
        shape, queries, config = self.shape, self.queries, self.read_config
        alone = shape.tokens == 0
        assert d_q is not None
        first = self.held and alone
        _describe(shape, queries, after, self.arguments, keys=False, first=first)
        tiles = -(-queries.count // config["T"])
        blocks, parts = -(-shape.values // config["C"]), -(-shape.wide // config["K"])
        got = self.empty(self.heads, queries.count, shape.wide)
        of_rows = strides("y", d_y, "bmh")
        common = {
            "VALUES": shape.values,
            "WIDE": shape.wide,
            "T": config["T"],
            "K": config["K"],
            "C": config["C"],
            "ROWS": aligned(d_y),
            "PRECISION": runtime.precision(shape.dtype, self.device),
            "STAGES": config.num_stages,
        }
        arguments = {
            "d_y": d_y, "state": behind, "out": got, "parts": parts, "tiles": tiles,
            "count": queries.count, **of_rows, **strides("a", behind, "bhp"),
        }  # fmt: skip
        constants = common | {"HELD": self.held and alone, "ALIGNED": aligned(behind)}
        self.launch("answer", parts * tiles * self.heads, config, arguments, constants)
        d_behind = self.like_state()
        base = None if alone else d_state
        arguments = {
            "features": queries.features, "y": d_y, "gate": None, "base": base, "out": d_behind,
            "blocks": blocks, "parts": parts, "count": queries.count, **of_rows,
            "stride_gb": 0, "stride_gm": 0, "stride_gh": 0,
            **strides("a", d_behind if base is None else base, "bhp"),
        }  # fmt: skip
        constants = common | {
            "BASED": base is not None,
            "HELD": False,
            "ZERO": self.held and alone,
            "GATED": False,
            "CHANNELS": False,
            "MINUS": False,
            "ALIGNED": base is not None and aligned(base),
            "FEATURES": shape.wide * shape.dtype.itemsize % 16 == 0,
        }
        self.launch("outer", blocks * parts * self.heads, config, arguments, constants)
        self.rows_back(queries, got, after, d_q)
        d_after = self.empty(*shape.state[:3])
        if not alone and not shape.denominator:
            return d_behind, d_normalizer
        if not shape.denominator:
            return d_behind, d_after.zero_()
        self.add(
            queries, queries.weights, None if alone else d_normalizer, d_after,
            zero=self.held and alone,
        )  # fmt: skip
        return d_behind, d_after

    # ---- tokens ---------------------------------------------------------------------------------

    def look_up(self) -> None:
        """E."""
        shape = self.shape
        self.change = self.empty(shape.batch, shape.heads, shape.tokens, shape.values)
        v = last_contiguous(self.given.v)
        self._look(
            self.state, self.change,
            {"v": v, "change": None, "d_v": None, "d_beta": None, **strides("v", v, "bmh")},
            back=False,
        )  # fmt: skip

    def through_values(
        self, d_state: Tensor, d_v: Tensor, d_beta: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """X = β ∘ F dA', and the shares of β's gradient that blocks of columns have."""
        shape = self.shape
        upstream = self.empty(shape.batch, shape.heads, shape.tokens, shape.values)
        shares = None
        if not shape.channels:
            blocks = -(-shape.values // self.config["C"])
            shares = self.empty(blocks, self.heads, shape.tokens)
        arguments = {
            "v": None, "change": self.change, "d_v": d_v,
            "d_beta": d_beta if shares is None else shares,
            "stride_vb": 0, "stride_vm": 0, "stride_vh": 0,
        }  # fmt: skip
        self._look(d_state, upstream, arguments, back=True)
        return upstream, shares

    def _look(self, state: Tensor, out: Tensor, more: dict[str, Any], *, back: bool) -> None:
        shape, config = self.shape, self.config
        blocks = -(-shape.values // config["C"])
        arguments = more | {
            "features": self.keys.features, "state": state, "inverse": self.keys.inverse,
            "beta": self.beta, "out": out, "blocks": blocks, "count": shape.tokens,
            **strides("g", self.beta, "bmh"), **strides("a", state, "bhp"),
        }  # fmt: skip
        constants = self._common() | {
            "BACK": back,
            "HELD": self.held and not back,
            "CHANNELS": shape.channels,
            "ALIGNED": aligned(state),
            "M": runtime.padded(shape.tokens),
        }
        self.launch("look", blocks * self.heads, config, arguments, constants)

    def _common(self) -> dict[str, Any]:
        shape, config = self.shape, self.config
        return {
            "VALUES": shape.values,
            "WIDE": shape.wide,
            "K": config["K"],
            "C": config["C"],
            "PRECISION": self.precision,
            "STAGES": config.num_stages,
        }

    def of_tokens(
        self, base: Tensor, gate: Tensor, y: Tensor, out: Tensor, *, minus: bool = False,
        zero: bool = False, precision: str | None = None,
    ) -> None:  # fmt: skip
        """out = base ± Fᵀ (gate ∘ y). A base that is not what was found in an empty memory has a
        result that is 0 there, `zero`, or counts.
        """
        shape, config = self.shape, self.config
        base = last_contiguous(base)
        blocks, parts = -(-shape.values // config["C"]), -(-shape.wide // config["K"])
        channels = gate.ndim == 4
        gate = last_contiguous(gate) if channels else gate
        arguments = {
            "features": self.keys.features, "y": y, "gate": gate, "base": base, "out": out,
            "blocks": blocks, "parts": parts, "count": shape.tokens,
            "stride_yb": y.stride(0), "stride_ym": y.stride(2), "stride_yh": y.stride(1),
            **strides("g", gate, "bmh"), **strides("a", base, "bhp"),
        }  # fmt: skip
        constants = self._common() | {
            "BASED": True,
            "HELD": self.held and not zero,
            "ZERO": self.held and zero,
            "GATED": True,
            "CHANNELS": channels,
            "MINUS": minus,
            "ALIGNED": aligned(base),
            "ROWS": False,
            "FEATURES": False,
            "T": runtime.padded(shape.tokens),
        }
        if precision is not None:
            constants["PRECISION"] = precision
        constants["STAGES"] = 1  # all tokens are one tile
        self.launch("outer", blocks * parts * self.heads, config, arguments, constants)

    def through_keys(
        self, upstream: Tensor, d_state: Tensor, d_after: Tensor, shares: Tensor | None,
        d_k: Tensor, d_beta: Tensor,
    ) -> None:  # fmt: skip
        """The gradients of k and of β, and dd."""
        shape, config = self.shape, self.config
        parts = -(-shape.wide // config["K"])
        splits, span = self._splits(parts)
        got = self.empty(splits, self.heads, shape.tokens, shape.wide)
        of_w = self.empty(splits * parts, self.heads, shape.tokens)
        arguments = {
            "change": self.change, "beta": self.beta, "upstream": upstream, "d_behind": d_state,
            "state": self.state, "features": self.keys.features, "inverse": self.keys.inverse,
            "out": got, "of_w": of_w, "parts": parts, "splits": splits, "span": span,
            "count": shape.tokens, **strides("g", self.beta, "bmh"),
            **strides("a", self.state, "bhp"), **strides("d", d_state, "bhp"),
        }  # fmt: skip
        constants = self._common() | {
            "HELD": self.held,
            "CHANNELS": shape.channels,
            "ALIGNED": aligned(self.state),
            "UP_ALIGNED": aligned(d_state),
            "M": runtime.padded(shape.tokens),
        }
        self.launch("contract", parts * splits * self.heads, config, arguments, constants)
        self.rows_back(
            self.keys, got, self.normalizer, d_k, of_w=of_w, d_after=d_after.contiguous(),
            shares=shares, d_beta=d_beta,
        )  # fmt: skip

    def _splits(self, parts: int) -> tuple[int, int]:
        """In how many runs of columns their products are added, and how long these are: as many
        as keep all multiprocessors busy.
        """
        columns, processors = self.config["C"], Device.of(self.device).multiprocessors
        blocks = -(-self.shape.values // columns)
        wanted = -(-WAVES * processors // max(parts * self.heads, 1))
        span = -(-blocks // min(wanted, blocks))
        return -(-blocks // span), span * columns

    def rows_back(
        self, rows: _Rows, got: Tensor, normalizer: Tensor, d_x: Tensor, *,
        of_w: Tensor | None = None, d_after: Tensor | None = None, shares: Tensor | None = None,
        d_beta: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The gradient of keys or of queries."""
        shape, keys = self.shape, of_w is not None
        tiles = -(-rows.count // GRADIENTS["R"])
        arguments = rows.arguments | {
            "got": got, "of_w": of_w, "inverse": rows.inverse, "gamma": rows.gamma,
            "found": rows.found, "size": rows.size, "d_after": d_after, "normalizer": normalizer,
            "of_beta": shares, "d_x": d_x, "d_beta": d_beta, "weights": rows.weights,
            "tiles": tiles, "splits": got.shape[0] if keys else 1,
            "sums": 0 if of_w is None else of_w.shape[0],
            "blocks": 0 if shares is None else shares.shape[0],
            "stride_part": self.heads * rows.count * shape.wide,
            "stride_sum": self.heads * rows.count, **strides("z", normalizer, "bh"),
        }  # fmt: skip
        constants = {
            "KEYS": keys,
            "FIRST": self.held,
            "HELD": self.held and (keys or shape.tokens == 0),
            "NORMALIZE": shape.normalize,
            "DENOMINATOR": shape.denominator,
            "FULL": keys and shape.full and shape.denominator and shape.correction,
            "SHARED": shares is not None,
            "ORDER": shape.order,
            "WIDTH": shape.width,
            "WIDE": shape.wide,
            "W": runtime.padded(shape.width),
            "R": GRADIENTS["R"],
            "K": GRADIENTS["K"],
        }
        self.launch("rows_back", tiles * self.heads, GRADIENTS, arguments, constants)
