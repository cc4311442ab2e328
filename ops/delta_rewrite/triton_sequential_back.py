"""Triton backend: the launcher of the backward of what writes tokens one after another.

The tokens are written once more; reads go as in `triton_back`, and so does φ, which the gradients
of all blocks of columns, and of z, reach as parts of one sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import triton_runtime as runtime
from ..checks import aligned, last_contiguous
from .op import RewriteShape, RewriteTensors
from .triton_back import Back, strides
from .triton_sequential import NUMBERS, SEQUENTIAL_KERNELS, Walked, chain_config, walk
from .triton_spaces import OP


def bwd(
    shape: RewriteShape,
    d_y: Tensor,
    d_state: Tensor,
    d_normalizer: Tensor,
    given: RewriteTensors,
    change: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of k, v, beta, state, normalizer and q; None if there are no queries.

    E is formed again with the rest, `change` or not.
    """
    found = walk(replace(shape, echo=True), given)
    back = Back(shape, given, found.change)
    d_q = None if given.q is None else back.empty(*given.q.shape, dtype=given.q.dtype)
    d_state, d_normalizer = map(last_contiguous, (d_state, d_normalizer))
    if shape.reads:
        d_state, d_normalizer = back.through_reads(
            last_contiguous(d_y), found.state, found.normalizer, d_state, d_normalizer, d_q
        )
    return *_tokens(back, found, d_state, d_normalizer), d_q


def _tokens(back: Back, found: Walked, d_state: Tensor, d_normalizer: Tensor) -> list[Tensor]:
    shape, given = back.shape, back.given
    config = chain_config(shape)
    blocks = -(-shape.values // config["C"])
    heads, total = back.heads, back.heads * shape.tokens
    d_k, d_v, d_beta = (
        back.empty(*x.shape, dtype=x.dtype) for x in (given.k, given.v, given.beta)
    )  # fmt: skip
    shares = None if shape.channels else back.empty(blocks, heads, shape.tokens)
    got = back.empty(blocks + shape.denominator, heads, shape.tokens, shape.wide)
    of_w = back.empty(blocks, heads, shape.tokens)
    upstream = back.empty(heads, shape.tokens, shape.values)
    d_before, d_z = back.like_state(), back.empty(*shape.state[:3])
    common: dict[str, Any] = back.arguments | {
        "features": found.features, "inverse": found.inverse, "got": got, "blocks": blocks,
        "tokens": shape.tokens, "total": total,
    }  # fmt: skip
    of_beta = {"beta": back.beta, "change": found.change, **strides("g", back.beta, "bmh")}
    rules: dict[str, Any] = {
        "FIRST": back.held,
        "WIDE": shape.wide,
        "P": runtime.padded(shape.wide),
    }
    columns = rules | {"CHANNELS": shape.channels, "VALUES": shape.values, "C": config["C"]}

    def launch(
        kernel: str, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        own = NUMBERS if kernel == "numbers_back" else config
        where = SEQUENTIAL_KERNELS, kernel
        runtime.launch(OP, where, programs, shape.device, own, common | arguments, constants)

    arguments = of_beta | {
        "d_behind": d_state, "upstream": upstream, "d_v": d_v,
        "d_beta": d_beta if shares is None else shares, "d_before": d_before,
        **strides("a", d_state, "bhp"),
    }  # fmt: skip
    constants = columns | {"ALIGNED": aligned(d_state)}
    launch("chain_back", blocks * heads, arguments, constants)
    arguments = of_beta | {
        "upstream": upstream, "state": back.state, "of_w": of_w, **strides("a", back.state, "bhp"),
    }  # fmt: skip
    launch("chain_again", blocks * heads, arguments, columns | {"ALIGNED": aligned(back.state)})
    if shape.denominator:
        arguments = {
            "size": found.size, "gamma": found.gamma, "found": found.found, "of_w": of_w,
            "normalizer": found.normalizer, "d_after": d_normalizer, "d_before": d_z,
            **strides("z", d_normalizer, "bh"),
        }  # fmt: skip
        constants = rules | {
            "FULL": shape.full and shape.correction,
            "BLOCKS": runtime.padded(blocks),
        }
        launch("numbers_back", heads, arguments, constants)
    else:
        back.add(None, of_w, d_normalizer, d_z, zero=back.held)
    # φ's part is that of a call without denominators: all they give is in `got`.
    plain = Back(replace(shape, denominator=False), given, found.change)
    plain.describe_keys()
    plain.rows_back(
        plain.keys, got, back.normalizer, d_k, of_w=of_w, d_after=got, shares=shares, d_beta=d_beta
    )
    return [d_k, d_v, d_beta, d_before, d_z]
