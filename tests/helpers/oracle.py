"""Runs an op, the literal definition in float64 and in the op's dtype, and compares all three.

What counts as right is `fastweights.autotune.verify`, a run is that of `autotune.check`; this adds
views full of NaN around the inputs and several seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from fastweights.autotune.check import Tensors, bit_equal, is_floating, run
from fastweights.autotune.check import named as named
from fastweights.autotune.verify import Comparison
from fastweights.ops import alloc

from . import inputs


@dataclass(frozen=True)
class _Seed:
    arguments: dict[str, Any]
    truth: tuple[Tensors, Tensors]
    yardstick: tuple[Tensors, Tensors]
    upstream: Tensors


class Oracle:
    """Truth and yardstick of one case, computed once and asked about many ops or configs.

    Args:
        reference: the literal definition; takes the arguments that `make_inputs` returns.
        make_inputs: `make_inputs(seed, dtype, device)` returns the call's keyword arguments. All
            floating tensors among them are differentiated.
        dtype, device: of the inputs.
        seeds: one run each; the worst counts.
        grads: whether gradients are compared too.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        make_inputs: Callable[[int, torch.dtype, torch.device], dict[str, Any]],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        seeds: Sequence[int] = (0, 1, 2),
        grads: bool = True,
    ) -> None:
        self.dtype = dtype
        self.grads = grads
        device = torch.device(device)
        self.seeds = [
            self._prepare(reference, make_inputs(seed, dtype, device), seed) for seed in seeds
        ]

    def _prepare(
        self, reference: Callable[..., Any], arguments: dict[str, Any], seed: int
    ) -> _Seed:
        # Plain torch sees contiguous copies: views are the op's difficulty, not the yardstick's.
        plain = {n: x.contiguous() if is_floating(x) else x for n, x in arguments.items()}
        exact = {n: x.double() if is_floating(x) else x for n, x in plain.items()}
        upstream: Tensors = {}

        def draw(results: Tensors) -> Tensors:
            for i, (name, x) in enumerate(results.items()):
                if not x.requires_grad:
                    continue
                generator = torch.Generator(x.device).manual_seed(1000 * seed + i + 17)
                noise = torch.randn(x.shape, generator=generator, device=x.device)
                # A result of −inf has no gradient to pass on.
                upstream[name] = noise.masked_fill(x.detach().isinf(), 0.0).to(x.dtype)
            return upstream

        def same(results: Tensors) -> Tensors:
            return {name: upstream[name].to(results[name].dtype) for name in upstream}

        yardstick = run(reference, plain, draw if self.grads else None)
        truth = run(reference, exact, same if self.grads else None)
        return _Seed(arguments, truth, yardstick, upstream)

    def measure(self, op: Callable[..., Any], **options: Any) -> Comparison:
        """Run the op on every seed under poisoned allocation and gather its errors."""
        comparison = Comparison(self.dtype)
        for seed in self.seeds:

            def upstream(results: Tensors, seed: _Seed = seed) -> Tensors:
                return {name: inputs.embed(x) for name, x in seed.upstream.items()}

            with alloc.poison():
                results, gradients = run(
                    op, seed.arguments | options, upstream if self.grads else None
                )
            scale = _stack(seed.upstream)
            for got, truth, plain, yard in (
                (results, seed.truth[0], seed.yardstick[0], None),
                (gradients, seed.truth[1], seed.yardstick[1], scale),
            ):
                if list(got) != list(truth):
                    raise AssertionError(f"results {list(got)}, expected {list(truth)}")
                for name, x in got.items():
                    if x.dtype != plain[name].dtype:
                        raise AssertionError(
                            f"{name}: dtype {x.dtype}, plain torch returns {plain[name].dtype}"
                        )
                    comparison.add(name, x, truth[name], plain[name], yard)
        return comparison

    def check(self, op: Callable[..., Any], label: str = "", **options: Any) -> None:
        """Raise AssertionError if any output or gradient of the op is too far from the truth."""
        self.measure(op, **options).check(label or getattr(op, "__name__", "op"))


def _stack(upstream: Tensors) -> torch.Tensor | None:
    if not upstream:
        return None
    return torch.cat([x.double().reshape(-1) for x in upstream.values()])


def check_op(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    make_inputs: Callable[[int, torch.dtype, torch.device], dict[str, Any]],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    grads: bool = True,
    label: str = "",
    **options: Any,
) -> None:
    """`Oracle(...).check(op)` in one call; `options` (backend=…) go to the op alone."""
    oracle = Oracle(reference, make_inputs, dtype, device, seeds=seeds, grads=grads)
    oracle.check(op, label, **options)


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Gather failure messages and raise one AssertionError at the end, so that all are seen."""
    failures: list[str] = []
    yield failures
    if failures:
        raise AssertionError(f"{len(failures)} failed\n" + "\n".join(failures))


def assert_bit_equal(got: Tensors, expected: Tensors, label: str = "") -> None:
    """Same names, same bits; the message says which result differs, where and by how much."""
    if list(got) != list(expected):
        raise AssertionError(f"{label}: results {list(got)}, expected {list(expected)}")
    for name, x in got.items():
        y = expected[name]
        if bit_equal(x, y):
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(
                f"{label}: {name} is {tuple(x.shape)} {x.dtype}, "
                f"expected {tuple(y.shape)} {y.dtype}"
            )
        differ = (x != y) & ~(x.isnan() & y.isnan())
        where = differ.nonzero()
        at = tuple(where[0].tolist()) if len(where) else "the sign of a zero"
        gap = float((x.double() - y.double()).abs().nan_to_num(inf).max())
        raise AssertionError(
            f"{label}: {name} differs in {len(where)} of {prod(x.shape)} elements, "
            f"first at {at}, by up to {gap:.3e}"
        )
