"""Launcher of the backward kernels.

Those over pairs are in `triton_bwd` and, for Hopper, in `hopper_dkdv` and `hopper_dq`; those over
rows in `triton_bwd_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...autotune.space import Config, Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from .op import EPS, PACKAGE, AttentionShape, Lengths, NullParameters
from .triton_arguments import (
    HOPPER_ROWS,
    SIZES,
    count_tiles,
    heads_together,
    length_arguments,
    null_arguments,
    precision,
    rule_flags,
    stride_arguments,
)
from .triton_spaces import (
    OP,
    SPACE_BWD,
    HopperTiles,
    block_d,
    bucket,
    hopper_chunks,
    hopper_dkdv_tiles,
    hopper_dq_tiles,
    padded_width,
)

BACKWARD = f"{PACKAGE}.triton_bwd"
DKDV_HOPPER = (f"{PACKAGE}.hopper_dkdv", "attention_bwd_dkdv")
DQ_HOPPER = (f"{PACKAGE}.hopper_dq", "attention_bwd_dq")
BACKWARD_ROWS = f"{PACKAGE}.triton_bwd_rows"

ROW_TILE = 128  # unit of the padded row layout of backward; as in triton_bwd_rows
VECTORS, SOFTMAX_VECTORS = 12, 3  # row vectors of backward; named in triton_bwd_rows
PAIR_KERNELS = ("attention_bwd_dkdv", "attention_bwd_dq")
STEP_NUMBERS = 2048  # of each operand that a step of prepare holds
FINISH_ROWS = 64  # rows of a program of finish


class Backward:
    """One backward call: what its kernels share, and the kernels in order."""

    def __init__(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        null: NullParameters | None,
        lengths: Lengths,
    ) -> None:
        self.shape = shape
        self.device = shape.device
        self.q, self.k, self.v = (last_contiguous(x) for x in (q, k, v))
        self.null = null
        self.config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
        self.width = block_d(shape.head_dim)
        self.chunk, self.chunks = hopper_chunks(padded_width(shape.head_dim))
        self.heads = shape.batch * shape.heads_q
        self.padded = count_tiles(shape, shape.tq, ROW_TILE) * ROW_TILE
        self.lengths = length_arguments(shape, lengths)
        self.constants = {
            "POLAR": shape.polar,
            **rule_flags(shape),
            "WIDTH": shape.head_dim,
            "BLOCK_D": self.width,
        }

    def _launch(
        self,
        name: str,
        programs: int,
        arguments: dict[str, Any],
        constants: dict[str, Any],
        config: Config | None = None,
    ) -> None:
        chosen = config or Config.make(num_warps=4, num_stages=1, matrix="fma")
        kernel = (BACKWARD if name in PAIR_KERNELS else BACKWARD_ROWS, name)
        runtime.launch(OP, kernel, programs, self.device, chosen, arguments, constants)

    def _gains(self) -> dict[str, Any]:
        null = null_arguments(self.null)
        return {name: null[name] for name in ("null_base", "null_slope", "length_gain")}

    def _float(self, *size: int) -> torch.Tensor:
        return empty(size, dtype=torch.float32, device=self.device)

    def run(
        self,
        d_out: torch.Tensor,
        d_count: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        n_eff: torch.Tensor | None,
        rho: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv and, in Polar mode, the gradients of the five parameters."""
        self._prepare(last_contiguous(d_out), d_count, out, lse, n_eff, rho)
        if self.config["SINGLE"]:
            buffer = self._float(self.heads * self.width, self.padded).zero_()
            dk, dv = self._dkdv(buffer)
            dq = self._finish(buffer)
        elif self.config.get("HOPPER"):
            # One a kernel, at addresses as aligned as those of tensors of their own.
            self.counters = list(torch.zeros(2, 4, dtype=torch.int32, device=self.device))
            dk, dv = self._hopper_dkdv()
            dq = self._hopper_dq()
        else:
            dk, dv = self._dkdv(None)
            dq = self._dq()
        if self.null is None:
            return dq, dk, dv
        return (dq, dk, dv, *self._parameters(self.null))

    def _prepare(
        self,
        d_out: torch.Tensor,
        d_count: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        n_eff: torch.Tensor | None,
        rho: torch.Tensor | None,
    ) -> None:
        """Gs, row statistics, and the first partial sums of the parameter gradients."""
        shape = self.shape
        tiles = self.padded // ROW_TILE
        rows = self.heads * self.padded
        operand = (rows, shape.head_dim)
        self.rows = self._float(VECTORS if shape.polar else SOFTMAX_VECTORS, rows)
        self.by_pairs = self._float(rows) if shape.null_value else None
        self.gs = empty(operand, dtype=shape.dtype, device=self.device)
        self.q_rows = None  # a padded copy, where tiles of q could meet another sequence
        if shape.packed:
            self.q_rows = empty(operand, dtype=shape.dtype, device=self.device)
        self.sums = None
        if shape.polar:
            self.sums = self._float(shape.heads_q, shape.batch * tiles, 4 + shape.head_dim)
        else:
            d_count = d_count.contiguous()  # d lse, (B, Hq, Tq)
        # Steps of Polar mode keep more of a row in registers: they have half as many.
        step = STEP_NUMBERS // 2 if shape.polar else STEP_NUMBERS
        step = max(4, min(64, step // self.width))
        stride_b, stride_t, stride_h = d_count.stride()
        arguments = {
            "q": self.q,
            "v": self.v,
            "d_out": d_out,
            "d_count": d_count,
            "out": out,
            "lse": lse,
            "n_eff": n_eff,
            "rho": rho,
            **null_arguments(self.null),
            "q_rows": self.q_rows,
            "gs": self.gs,
            "vectors": self.rows,
            "by_pairs": self.by_pairs,
            "sums": self.sums,
            "partials": shape.batch * tiles,
            "padded": self.padded,
            "row_stride": rows,
            "scale": shape.scale,
            "group": shape.group,
            **stride_arguments("q", self.q),
            **stride_arguments("v", self.v),
            **stride_arguments("g", d_out),
            "stride_cb": stride_b,
            "stride_ct": stride_t,
            "stride_ch": stride_h,
            **self.lengths,
        }
        constants = {
            **self.constants,
            "NULL_VALUE": shape.null_value,
            "STEP": step,
            "ALIGNED": all(map(aligned, (self.q, d_out))),
            "EPS": EPS,
        }
        self._launch("attention_bwd_prepare", tiles * self.heads, arguments, constants)

    def _pair_kernel(self, m: int, n: int, stages: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and constants that the two kernels over pairs share."""
        # The coordinates of a bulk copy are 32-bit: rows of the padded layout have to be countable.
        bulk = runtime.bulk_copies(self.device, self.q, self.k, self.v)
        bulk = bulk and self.heads * self.padded < 2**31
        q = self.q if self.q_rows is None else self.q_rows
        operands = {"q": q, "k": self.k, "v": self.v, "gs": self.gs}
        if bulk:
            tile = runtime.head_tiles if self.q_rows is None else runtime.matrix_tiles
            operands = {
                "q": tile(q, m, self.width),
                "k": runtime.head_tiles(self.k, n, self.width),
                "v": runtime.head_tiles(self.v, n, self.width),
                "gs": runtime.matrix_tiles(self.gs, m, self.width),
            }
        arguments = {
            **operands,
            "vectors": self.rows,
            **stride_arguments("q", self.q),
            **stride_arguments("k", self.k),
            **stride_arguments("v", self.v),
            "padded": self.padded,
            "row_stride": self.heads * self.padded,
            "group": self.shape.group,
            "scale": self.shape.scale,
            **{name: self.lengths[name] for name in SIZES},
        }
        constants = {
            **self.constants,
            "BLOCK_M": m,
            "BLOCK_N": n,
            "TMA": bulk,
            "ALIGNED": self.shape.aligned,
            "PRECISION": precision(self.shape),
            "STAGES": stages,
        }
        return arguments, constants

    def _dkdv(self, buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv; with a buffer also the sums of dq, added into it."""
        shape, config = self.shape, self.config
        m, n = config["BLOCK_M"], config["BLOCK_N"]
        dk = empty(self.k.shape, dtype=shape.dtype, device=self.device)
        dv = empty(self.v.shape, dtype=shape.dtype, device=self.device)
        arguments, constants = self._pair_kernel(m, n, config.num_stages)
        if constants["TMA"]:
            arguments["vectors"] = runtime.matrix_tiles(self.rows, 1, m)
        # The interpreter has descriptors but no bulk additions.
        reduce = constants["TMA"] and Device.of(self.device).capability > 0
        dq: Any = buffer
        if reduce and buffer is not None:
            dq = runtime.matrix_tiles(buffer, self.width, m)
        arguments |= {"dk_out": dk, "dv_out": dv, "dq": dq}
        constants |= {"SINGLE": bool(config["SINGLE"]), "REDUCE": reduce}
        heads, tiles = shape.batch * shape.heads_k, count_tiles(shape, shape.tk, n)
        arguments["together"] = heads_together(self.device, heads, tiles)
        programs = heads * tiles if self.k.numel() else 0
        self._launch("attention_bwd_dkdv", programs, arguments, constants, config)
        return dk, dv

    def _dq(self) -> torch.Tensor:
        """dq of the split form."""
        shape, config = self.shape, self.config
        m, n, stages = config["DQ_M"], config["DQ_N"], config["DQ_STAGES"]
        tiles = count_tiles(shape, shape.tq, m)
        arguments, constants = self._pair_kernel(m, n, stages)
        dq = self._dq_outputs(tiles)
        arguments |= {
            **self._gains(),
            "by_pairs": self.by_pairs,
            "dq_out": dq,
            "sums": self.sums_dq,
            "partials": shape.batch * tiles,
            "together": heads_together(self.device, self.heads, tiles),
            "n_keys": self.lengths["n_keys"],
            "stride_nb": self.lengths["stride_nb"],
        }
        half = Config.make(
            BLOCK_M=m, BLOCK_N=n, num_warps=config["DQ_WARPS"], num_stages=stages,
            matrix=config.matrix,
        )  # fmt: skip
        constants["NULL_VALUE"] = shape.null_value
        self._launch("attention_bwd_dq", tiles * self.heads, arguments, constants, half)
        return dq

    def _hopper(
        self,
        kernel: tuple[str, str],
        heads: int,
        of_head: int,
        operands: dict[str, Any],
        arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:
        """Launch a Hopper kernel; `operands` are (tensor, rows of a tile)."""
        shape = self.shape
        descriptors = {}
        for operand, (x, rows) in operands.items():
            describe = runtime.head_tiles if x.ndim == 4 else runtime.matrix_tiles
            descriptors[operand] = describe(x, rows, self.chunk, gluon=True)
        sizes = {size: self.lengths[size] for size in SIZES}
        scalars = {
            "counter": self.counters.pop(),
            "tiles": heads * of_head,
            "together": heads_together(self.device, heads, of_head),
            "group": shape.group,
            "padded": self.padded,
            "scale": shape.scale,
        }
        rules = ("POLAR", "CAUSAL", "WINDOW", "PACKED", "WIDTH")
        constants |= {rule: self.constants[rule] for rule in rules}
        constants |= {"CHUNK": self.chunk, "CHUNKS": self.chunks}
        arguments = {**descriptors, **arguments, **sizes, **scalars}
        programs = min(heads * of_head, Device.of(self.device).multiprocessors)
        runtime.launch(OP, kernel, programs, self.device, self.config, arguments, constants)

    def _buffers(self, tiles: Callable[[Config, int, int], HopperTiles]) -> int:
        return tiles(self.config, self.shape.dtype.itemsize, self.chunk * self.chunks).buffers

    def _hopper_dkdv(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, m, n = self.shape, self.config["BLOCK_M"], self.config["BLOCK_N"]
        dk = empty(self.k.shape, dtype=shape.dtype, device=self.device)
        dv = empty(self.v.shape, dtype=shape.dtype, device=self.device)
        operands = {
            "q": (self.q if self.q_rows is None else self.q_rows, m),
            "gs": (self.gs, m),
            "k": (self.k, HOPPER_ROWS),
            "v": (self.v, HOPPER_ROWS),
        }
        arguments = {
            "rows": runtime.matrix_tiles(self.rows, 1, m, gluon=True),
            "dk_out": dk,
            "dv_out": dv,
        }
        constants = {
            "BLOCK_M": m,
            "BLOCK_N": n,
            "STAGES": self.config.num_stages,
            "BUFFERS": self._buffers(hopper_dkdv_tiles),
        }
        heads, tiles = shape.batch * shape.heads_k, count_tiles(shape, shape.tk, n)
        self._hopper(DKDV_HOPPER, heads, tiles, operands, arguments, constants)
        return dk, dv

    def _hopper_dq(self) -> torch.Tensor:
        shape, m, n = self.shape, self.config["DQ_M"], self.config["DQ_N"]
        tiles = count_tiles(shape, shape.tq, m)
        dq = self._dq_outputs(tiles * (m // HOPPER_ROWS))  # each consumer has sums of its own
        operands = {
            "q": (self.q, HOPPER_ROWS),
            "gs": (self.gs, HOPPER_ROWS),
            "k": (self.k, n),
            "v": (self.v, n),
        }
        arguments = {
            "rows": self.rows,
            "by_pairs": self.by_pairs,
            **self._gains(),
            "dq_out": dq,
            "sums": self.sums_dq,
            "partials": shape.batch * tiles,
            "row_stride": self.heads * self.padded,
        }
        constants = {
            "NULL_VALUE": shape.null_value,
            "BLOCK_N": n,
            "STAGES": self.config["DQ_STAGES"],
            "BUFFERS": self._buffers(hopper_dq_tiles),
        }
        self._hopper(DQ_HOPPER, self.heads, tiles, operands, arguments, constants)
        return dq

    def _finish(self, buffer: torch.Tensor) -> torch.Tensor:
        """dq of the single-pass form, out of its fp32 buffer."""
        shape = self.shape
        tiles = count_tiles(shape, shape.tq, FINISH_ROWS)
        dq = self._dq_outputs(tiles)
        arguments = {
            "q": self.q if self.q_rows is None else self.q_rows,
            **stride_arguments("q", self.q),
            **self._gains(),
            "dq": buffer,
            "dq_out": dq,
            "sums": self.sums_dq,
            "partials": shape.batch * tiles,
            "padded": self.padded,
            "scale": shape.scale,
            **self.lengths,
        }
        constants = {**self.constants, "BLOCK_M": FINISH_ROWS, "ALIGNED": shape.aligned}
        self._launch("attention_bwd_finish", tiles * self.heads, arguments, constants)
        return dq

    def _dq_outputs(self, tiles: int) -> torch.Tensor:
        shape = self.shape
        self.sums_dq = None
        if shape.polar:
            self.sums_dq = self._float(shape.heads_q, shape.batch * tiles, 3)
        return empty(self.q.shape, dtype=shape.dtype, device=self.device)

    def _parameters(self, null: NullParameters) -> tuple[torch.Tensor, ...]:
        """d null_value, d null_base, d null_slope, d length_gain, d magnitude_gain."""
        assert self.sums is not None
        assert self.sums_dq is not None
        shape = self.shape
        value, *scalars = null
        grads = [empty(x.shape, dtype=x.dtype, device=self.device) for x in scalars]
        d_value = empty(
            (0,) if value is None else value.shape,
            dtype=scalars[0].dtype if value is None else value.dtype,
            device=self.device,
        )
        arguments = {
            "sums": self.sums,
            "sums_dq": self.sums_dq,
            "d_value": None if value is None else d_value,
            "d_base": grads[0],
            "d_slope": grads[1],
            "d_length_gain": grads[2],
            "d_magnitude_gain": grads[3],
            "partials": self.sums.shape[1],
            "partials_dq": self.sums_dq.shape[1],
        }
        columns = 16  # of a null value, a program: one a head would leave the device idle
        constants = {
            "NULL_VALUE": value is not None,
            "WIDTH": shape.head_dim,
            "COLS": columns,
            "BLOCK_P": 256,
        }
        blocks = 1 if value is None else 1 + -(-shape.head_dim // columns)
        self._launch("attention_bwd_parameters", blocks * shape.heads_q, arguments, constants)
        return (d_value, *grads)
