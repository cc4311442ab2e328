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
from .triton_spaces import KERNELS, OP, PREPARE_CONFIG, SPACE_READ, SPACE_WRITE, bucket, refusal

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "rebuild", "spaces", "supports", "yields"]

SPACE_FWD, SPACE_BWD = SPACE_WRITE, back_spaces.SPACE_BACK


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
    return None if arch == "cpu" else "its kernels have not been checked on a GPU yet"


def spaces(shape: RewriteShape) -> dict[str, Space]:
    """The config spaces of what a call and its backward launch: nothing writes without tokens."""
    return _forward_spaces(shape) | _back_spaces(shape)


def _forward_spaces(shape: RewriteShape) -> dict[str, Space]:
    # What writes tokens one after another has a config by a rule.
    written = shape.tokens and not _one_by_one(shape)
    found = {"fwd": SPACE_WRITE} if written else {}
    return found | ({"fwd_read": SPACE_READ} if shape.reads else {})


def _back_spaces(shape: RewriteShape) -> dict[str, Space]:
    if shape.pool:
        return {}
    written = shape.tokens and (shape.echo or not _one_by_one(shape))
    found = {"bwd": back_spaces.SPACE_BACK} if written else {}
    return found | ({"bwd_read": back_spaces.SPACE_BACK_READS} if shape.reads else {})


def fwd(shape: RewriteShape, given: RewriteTensors) -> tuple[torch.Tensor | None, ...]:
    """y (B, Tq, H, Dv), state, normalizer, E; None for what the call has not.

    With slots the pools are written, and y is all that is returned.
    """
    call = _Call(shape, given)
    memory = given.state, given.normalizer
    call.prepare()
    after: tuple[torch.Tensor | None, ...] = (None, None)
    change = None
    if shape.tokens:
        one_by_one = _one_by_one(shape)
        memory, change = triton_sequential.write(shape, given) if one_by_one else call.write()
        after = memory if given.slots is None else after
    y = None if given.q is None else call.read(*memory)
    return y, *after, change


def bwd(
    shape: RewriteShape, d_y: torch.Tensor, d_state: torch.Tensor, d_normalizer: torch.Tensor,
    given: RewriteTensors, change: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of k, v, beta, state, normalizer and q; None if there are no queries.

    `change` is E if it was saved.
    """
    run = sequential_bwd if _one_by_one(shape) else parallel_bwd
    return run(shape, d_y, d_state, d_normalizer, given, change)


def _one_by_one(shape: RewriteShape) -> bool:
    return shape.sequential and shape.tokens > 1


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
            "FIRST": first is not None,
            "DENOMINATOR": shape.denominator,
            "WIDE": shape.wide,
        }

    def _empty(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return empty(size, dtype=dtype, device=self.device)

    def _launch(
        self, kernel: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        runtime.launch(
            OP, (KERNELS, kernel), programs, self.device, config, self.arguments | arguments,
            self.constants | constants,
        )  # fmt: skip

    def prepare(self) -> None:
        """φ of tokens and queries (B·H, ·, P) in their dtype; of tokens in fp32, too, w and γ.

        With an echo that of tokens is in fp32 alone: the backward takes off what they wrote.
        """
        shape, given = self.shape, self.given
        k, normalizer = last_contiguous(given.k), last_contiguous(given.normalizer)
        tokens, reads = shape.tokens, shape.reads
        # A kernel is told of both; where there is one, it stands for the other, too.
        q = k if given.q is None else last_contiguous(given.q)
        wide = shape.wide
        kind = torch.float32 if shape.echo else shape.dtype
        self.of_keys = self._empty(self.heads, tokens, wide, dtype=kind)
        self.of_queries = self._empty(self.heads, reads, wide, dtype=shape.dtype)
        self.inverse, self.gamma = (self._empty(self.heads, tokens) for _ in range(2))
        # Without denominators nothing asks for them in fp32: z stays as it is.
        wider = kind != torch.float32 and shape.denominator
        self.wide_keys = self._empty(self.heads, tokens, wide) if wider else self.of_keys
        config = PREPARE_CONFIG
        key_tiles = -(-tokens // config["R"])
        tiles = key_tiles + -(-reads // config["R"])
        arguments = {
            "k": k, "q": q, "features": self.of_keys, "wide_features": self.wide_keys,
            "query_features": self.of_queries, "normalizer": normalizer,
            "inverse": self.inverse, "gamma": self.gamma,
            "tiles": tiles, "key_tiles": key_tiles, "tokens": tokens, "reads": reads,
            "eps": shape.eps, "eps_norm": shape.eps_norm,
            **_strides("k", k, "bmh"), **_strides("q", q, "bmh"), **_strides("z", normalizer, "bh"),
        }  # fmt: skip
        constants = {
            "KEYS": tokens > 0,
            "WIDER": wider,
            "NORMALIZE": shape.normalize,
            "CORRECTION": shape.correction,
            "WIDTH": shape.width,
            "W": runtime.padded(shape.width),
            "R": config["R"],
            "K": config["K"],
        }
        self._launch("prepare", tiles * self.heads, config, arguments, constants)

    def write(self) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """The memory behind the tokens, and E if an echo needs it."""
        shape, given = self.shape, self.given
        config = choose(SPACE_WRITE, bucket(shape), Device.of(self.device))
        v, state, normalizer = map(last_contiguous, (given.v, given.state, given.normalizer))
        beta = last_contiguous(given.beta) if shape.channels else given.beta
        state_out, normalizer_out = state, normalizer
        if given.slots is None:
            state_out, normalizer_out = self._empty(*shape.state), self._empty(*shape.state[:3])
        change = None
        if shape.echo:
            change = self._empty(shape.batch, shape.heads, shape.tokens, shape.values)
        blocks = -(-shape.values // config["C"])
        arguments = {
            "features": self.of_keys, "wide_features": self.wide_keys,
            "inverse": self.inverse, "gamma": self.gamma, "v": v, "beta": beta,
            "state": state, "normalizer": normalizer,
            "state_out": state_out, "normalizer_out": normalizer_out, "change": change,
            "blocks": blocks, "tokens": shape.tokens,
            **_strides("v", v, "bmh"), **_strides("b", beta, "bmh"),
            **_strides("a", state, "bhp"), **_strides("z", normalizer, "bh"),
            **_strides("o", state_out, "bhp"), **_strides("y", normalizer_out, "bh"),
        }  # fmt: skip
        constants = {
            "CHANGE": shape.echo,
            "CHANNELS": shape.channels,
            "ALIGNED": aligned(state) and aligned(state_out),
            "VALUES": shape.values,
            "K": config["K"],
            "PARTS": -(-shape.wide // config["K"]),
            "M": runtime.padded(shape.tokens),
            "C": config["C"],
            "PRECISION": self._precision(),
        }
        self._launch("rewrite", blocks * self.heads, config, arguments, constants)
        if given.slots is not None:
            # Pools whose last dimension is strided were copied, and are copied back.
            for pool, new in ((given.state, state), (given.normalizer, normalizer)):
                if new is not pool:
                    pool.copy_(new)
        return (state_out, normalizer_out), change

    def _precision(self) -> str:
        """Of products in fp32. TF32 keeps more of a memory than a 16-bit call's own elements would;
        but what an echo takes off again has to be what was added.
        """
        shape = self.shape
        if self.device.type == "cpu" or shape.dtype == torch.float32 or shape.echo:
            return runtime.precision(torch.float32, self.device)
        return "tf32"

    def read(self, state: torch.Tensor, normalizer: torch.Tensor) -> torch.Tensor:
        """y."""
        shape = self.shape
        y = self._empty(shape.batch, shape.reads, shape.heads, shape.values, dtype=shape.dtype)
        if shape.reads == 0:
            return y
        config = choose(SPACE_READ, bucket(shape), Device.of(self.device))
        state, normalizer = last_contiguous(state), last_contiguous(normalizer)
        blocks, tiles = -(-shape.values // config["C"]), -(-shape.reads // config["T"])
        arguments = {
            "features": self.of_queries, "state": state, "normalizer": normalizer, "y": y,
            "blocks": blocks, "tiles": tiles, "reads": shape.reads, "eps": shape.eps,
            **_strides("a", state, "bhp"), **_strides("z", normalizer, "bh"),
        }  # fmt: skip
        constants = {
            # Behind a write there is something to be read in every row.
            "FIRST": self.constants["FIRST"] and shape.tokens == 0,
            "ALIGNED": aligned(state),
            "ROWS_ALIGNED": shape.wide * shape.dtype.itemsize % 16 == 0,
            "VALUES": shape.values,
            "T": config["T"],
            "K": config["K"],
            "C": config["C"],
            "PRECISION": runtime.precision(shape.dtype, self.device),
            "STAGES": config.num_stages,
        }
        programs = self.heads * tiles * blocks
        self._launch("read", programs, config, arguments, constants)
        return y
