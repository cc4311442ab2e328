"""Triton backend: the launchers of the forward, in place and not; kernels in `triton_kernels`.

Those of the backward are in `triton_back` and `triton_sequential_back`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from . import triton_back_spaces as back_spaces
from . import triton_sequential
from .op import RewriteShape, RewriteTensors
from .triton_back import bwd as parallel_bwd
from .triton_back import rebuild
from .triton_sequential_back import bwd as sequential_bwd
from .triton_spaces import (
    KERNELS,
    OP,
    PREPARE_CONFIG,
    READ,
    SPACE_READ,
    SPACE_WHOLE,
    SPACE_WRITE,
    WHOLE,
    bucket,
    is_whole,
    one_by_one,
    refusal,
    write_bucket,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "rebuild", "spaces", "supports", "yields"]

SPACE_FWD, SPACE_BWD = SPACE_WRITE, back_spaces.SPACE_BACK
UNIT = 8  # 16-bit numbers in 16 bytes: what rows of a workspace are multiples of


def supports(shape: RewriteShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    device = Device.of(shape.device)
    if arch != "cpu" and device.capability < 80:
        return f"{arch} is older than sm_80"
    reason = refusal(shape)
    if reason is None:
        for space in (_back_spaces if shape.backward else _forward_spaces)(shape).values():
            if not space.fitting(space.bucket(shape), device):
                return f"no config of {space.name} fits into the shared memory of {arch}"
    return reason


def yields(shape: RewriteShape, arch: str) -> str | None:
    """None, or why "auto" goes past these kernels though they can run the call."""
    if shape.backward and arch != "cpu":
        return "its backward has not passed all checks on a GPU yet"
    return None


def spaces(shape: RewriteShape) -> dict[str, Space]:
    """The config spaces of what a call and its backward launch: nothing writes without tokens."""
    return _forward_spaces(shape) | _back_spaces(shape)


def _forward_spaces(shape: RewriteShape) -> dict[str, Space]:
    if is_whole(shape):
        return {"fwd_whole": SPACE_WHOLE}
    # What writes tokens one after another has a config by a rule.
    found = {"fwd": SPACE_WRITE} if shape.tokens and not one_by_one(shape) else {}
    return found | ({"fwd_read": SPACE_READ} if shape.reads else {})


def _back_spaces(shape: RewriteShape) -> dict[str, Space]:
    if shape.pool:
        return {}
    written = shape.tokens and (shape.echo or not one_by_one(shape))
    found = {"bwd": back_spaces.SPACE_BACK} if written else {}
    return found | ({"bwd_read": back_spaces.SPACE_BACK_READS} if shape.reads else {})


def fwd(shape: RewriteShape, given: RewriteTensors) -> tuple[torch.Tensor | None, ...]:
    """y (B, Tq, H, Dv), state, normalizer, E; None for what the call has not.

    With slots the pools are written, and y is all that is returned.
    """
    call = _Call(shape, given)
    after: tuple[torch.Tensor | None, ...] = (None, None)
    change = None
    if is_whole(shape):
        y = call.whole()
        return y, *((call.state, call.normalizer) if given.slots is None else after), change
    if shape.tokens:
        if one_by_one(shape):
            (call.state, call.normalizer), change = triton_sequential.write(shape, given)
        else:
            change = call.write()
        after = (call.state, call.normalizer) if given.slots is None else after
    y = None if given.q is None else call.read(given.q)
    return y, *after, change


def bwd(
    shape: RewriteShape, d_y: torch.Tensor, d_state: torch.Tensor, d_normalizer: torch.Tensor,
    given: RewriteTensors, change: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of k, v, beta, state, normalizer and q; None if there are no queries.

    `change` is E if it was saved.
    """
    run = sequential_bwd if one_by_one(shape) else parallel_bwd
    return run(shape, d_y, d_state, d_normalizer, given, change)


def _strides(letter: str, x: torch.Tensor, axes: str) -> dict[str, int]:
    return {f"stride_{letter}{axis}": x.stride(dim) for dim, axis in enumerate(axes)}


class _Call:
    """One call's tensors as the kernels take them, and its launches."""

    def __init__(self, shape: RewriteShape, given: RewriteTensors) -> None:
        self.shape, self.given, self.device = shape, given, shape.device
        self.heads = shape.batch * shape.heads
        first = None if given.first is None else given.first.contiguous().view(torch.int8)
        slots = None if given.slots is None else given.slots.contiguous()
        self.arguments: dict[str, Any] = {"slots": slots, "first": first, "heads": shape.heads}
        self.constants: dict[str, Any] = {
            "POOL": slots is not None,
            "DENOMINATOR": shape.denominator,
        }
        self.row = -(-shape.wide // UNIT) * UNIT
        self.sizes = {"WIDE": shape.wide, "ROW": self.row}
        # Behind a write there is something to be read in every row.
        self.read_first = first is not None and shape.tokens == 0
        self.state, self.normalizer = map(last_contiguous, (given.state, given.normalizer))
        # What reads multiply: the memory behind the tokens in 16 bits, once it has been written.
        self.copied: torch.Tensor | None = None

    def _empty(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return empty(size, dtype=dtype, device=self.device)

    def _launch(
        self, kernel: tuple[str, str], programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        runtime.launch(
            OP, kernel, programs, self.device, config, self.arguments | arguments,
            self.constants | constants,
        )  # fmt: skip

    def _features(self, x: torch.Tensor, kind: torch.dtype, *, keys: bool) -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
    ]:  # fmt: skip
        """φ of x (B·H, ·, ROW), 1/d of each row, and of keys φ in fp32 and γ."""
        shape, row = self.shape, self.row
        x, rows = last_contiguous(x), x.shape[1]
        features = self._empty(self.heads, rows, row, dtype=kind)
        # Without denominators nothing asks for them in fp32: z stays as it is.
        wider = keys and kind != torch.float32 and shape.denominator
        wide = self._empty(self.heads, rows, row) if wider else features
        inverse = self._empty(self.heads, rows)
        gamma = self._empty(self.heads, rows) if keys else inverse
        config = PREPARE_CONFIG
        tiles = -(-rows // config["R"])
        arguments = {
            "x": x, "features": features, "wide_features": wide, "normalizer": self.normalizer,
            "inverse": inverse, "gamma": gamma, "tiles": tiles, "rows": rows,
            "eps": shape.eps, "eps_norm": shape.eps_norm,
            **_strides("x", x, "bmh"), **_strides("z", self.normalizer, "bh"),
        }  # fmt: skip
        constants = {
            "FIRST": self.arguments["first"] is not None if keys else self.read_first,
            **self.sizes,
            "KEYS": keys,
            "WIDER": wider,
            "NORMALIZE": shape.normalize,
            "CORRECTION": shape.correction,
            "WIDTH": shape.width,
            "ORDER": shape.order,
            "W": runtime.padded(shape.width),
            "R": config["R"],
        }
        self._launch((KERNELS, "prepare"), tiles * self.heads, config, arguments, constants)
        return features, inverse, wide, gamma

    def whole(self) -> torch.Tensor | None:
        """All of a call of few tokens; y."""
        shape, given = self.shape, self.given
        config = choose(SPACE_WHOLE, bucket(shape), Device.of(self.device))
        k, v = last_contiguous(given.k), last_contiguous(given.v)
        q = k if given.q is None else last_contiguous(given.q)  # a kernel is told of one
        beta = last_contiguous(given.beta) if shape.channels else given.beta
        state, normalizer, y, counters = self.state, self.normalizer, None, None
        if given.q is not None:
            size = (shape.batch, shape.reads, shape.heads, shape.values)
            y = self._empty(*size, dtype=shape.dtype)
        blocks = -(-shape.values // config["C"])
        if given.slots is None:
            self.state, self.normalizer = self._empty(*shape.state), self._empty(*shape.state[:3])
        else:
            counters = torch.zeros(self.heads, dtype=torch.int32, device=self.device)
        tiles = -(-shape.reads // config["T"])
        splits = 1
        if given.slots is None:
            splits = self._splits(self.heads * blocks, tiles, config.num_warps)
        arguments = {
            "k": k, "v": v, "beta": beta, "state": state, "normalizer": normalizer,
            "state_out": self.state, "normalizer_out": self.normalizer, "q": q, "y": y,
            "counters": counters, "blocks": blocks, "splits": splits, "tokens": shape.tokens,
            "reads": shape.reads, "eps": shape.eps, "eps_norm": shape.eps_norm,
            **_strides("k", k, "bmh"), **_strides("v", v, "bmh"), **_strides("b", beta, "bmh"),
            **_strides("a", state, "bhp"), **_strides("z", normalizer, "bh"),
            **_strides("o", self.state, "bhp"), **_strides("y", self.normalizer, "bh"),
            **_strides("q", q, "bmh"),
        }  # fmt: skip
        constants = {
            "FIRST": self.arguments["first"] is not None,
            "READ": y is not None,
            "CHANNELS": shape.channels,
            "NORMALIZE": shape.normalize,
            "CORRECTION": shape.correction,
            "ALIGNED": aligned(state) and aligned(self.state),
            "V_ALIGNED": aligned(v),
            "VALUES": shape.values,
            "WIDTH": shape.width,
            "ORDER": shape.order,
            "W": runtime.padded(shape.width),
            "M": runtime.padded(shape.tokens),
            "T": config["T"],
            "C": config["C"],
            "PRECISION": runtime.precision(shape.dtype, self.device),
            "STAGES": config.num_stages,
        }
        programs = self.heads * blocks * splits
        self._launch((WHOLE, "whole"), programs, config, arguments, constants)
        self._copy_back(state, normalizer)
        return y

    def _splits(self, programs: int, tiles: int, warps: int) -> int:
        """Into how many programs one is split that reads so many tiles of queries: as many as there
        are at a time, of eight warps one on a multiprocessor.
        """
        at_once = Device.of(self.device).multiprocessors * max(1, 8 // warps)
        return max(1, min(tiles, at_once // max(1, programs)))

    def _copy_back(self, state: torch.Tensor, normalizer: torch.Tensor) -> None:
        """Pools whose last dimension is strided were copied, and are copied back."""
        given = self.given
        if given.slots is not None:
            for pool, new in ((given.state, state), (given.normalizer, normalizer)):
                if new is not pool:
                    pool.copy_(new)

    def write(self) -> torch.Tensor | None:
        """Leave the memory behind the tokens in `state` and `normalizer`; E if an echo needs it."""
        shape, given = self.shape, self.given
        config = choose(SPACE_WRITE, write_bucket(shape), Device.of(self.device))
        # The backward of an echo takes off what was added, which then has to be exact.
        kind = torch.float32 if shape.echo else shape.dtype
        features, inverse, wide, gamma = self._features(given.k, kind, keys=True)
        v, state, normalizer = last_contiguous(given.v), self.state, self.normalizer
        beta = last_contiguous(given.beta) if shape.channels else given.beta
        if given.slots is None:
            self.state, self.normalizer = self._empty(*shape.state), self._empty(*shape.state[:3])
        columns = -(-shape.values // UNIT) * UNIT
        if shape.reads and shape.dtype.itemsize == 2:
            self.copied = self._empty(self.heads, shape.wide, columns, dtype=shape.dtype)
        change = None
        if shape.echo:
            change = self._empty(shape.batch, shape.heads, shape.tokens, shape.values)
        blocks = -(-shape.values // config["C"])
        arguments = {
            "features": features, "wide_features": wide, "inverse": inverse, "gamma": gamma,
            "v": v, "beta": beta, "state": state, "normalizer": normalizer,
            "state_out": self.state, "normalizer_out": self.normalizer,
            "to_read": self.copied, "change": change, "blocks": blocks, "tokens": shape.tokens,
            **_strides("v", v, "bmh"), **_strides("b", beta, "bmh"),
            **_strides("a", state, "bhp"), **_strides("z", normalizer, "bh"),
            **_strides("o", self.state, "bhp"), **_strides("y", self.normalizer, "bh"),
        }  # fmt: skip
        constants = {
            "FIRST": self.arguments["first"] is not None,
            **self.sizes,
            "READ": self.copied is not None,
            "CHANGE": shape.echo,
            "CHANNELS": shape.channels,
            "ALIGNED": aligned(state) and aligned(self.state),
            "V_ALIGNED": aligned(v),
            "VALUES": shape.values,
            "COLUMNS": columns,
            "K": config["K"],
            "M": runtime.padded(shape.tokens),
            "C": config["C"],
            "PRECISION": runtime.precision(kind, self.device),
            "STAGES": config.num_stages,
        }
        self._launch((KERNELS, "rewrite"), blocks * self.heads, config, arguments, constants)
        self._copy_back(state, normalizer)
        return change

    def read(self, q: torch.Tensor) -> torch.Tensor:
        """y."""
        shape, copied = self.shape, self.copied
        y = self._empty(shape.batch, shape.reads, shape.heads, shape.values, dtype=shape.dtype)
        if shape.reads == 0:
            return y
        config = choose(SPACE_READ, bucket(shape), Device.of(self.device))
        features, inverse, _, _ = self._features(q, shape.dtype, keys=False)
        rows, inner, columns = config["T"], config["K"], config["C"]
        source = self.state if copied is None else copied
        bulk = copied is not None and runtime.bulk_copies(self.device, features, copied)
        operands: dict[str, Any] = {"features": features, "state": source}
        if bulk:
            operands = {
                "features": runtime.stack_tiles(features, rows, inner),
                "state": runtime.stack_tiles(source, inner, columns),
            }
        blocks, tiles = -(-shape.values // columns), -(-shape.reads // rows)
        arguments = operands | {
            "inverse": inverse, "y": y, "blocks": blocks, "tiles": tiles, "reads": shape.reads,
            **_strides("a", self.state, "bhp"),
        }  # fmt: skip
        constants = {
            "FIRST": self.read_first,
            **self.sizes,
            "COPY": copied is not None,
            "BULK": bulk,
            "ALIGNED": copied is not None or aligned(source),
            "VALUES": shape.values,
            "COLUMNS": -(-shape.values // UNIT) * UNIT,
            "T": rows,
            "K": inner,
            "C": columns,
            "PRECISION": runtime.precision(shape.dtype, self.device),
            "STAGES": config.num_stages,
        }
        programs = self.heads * tiles * blocks
        self._launch((READ, "read"), programs, config, arguments, constants)
        return y
