"""Sequences in groups side by side are what they are in one piece, to the last digits."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops.omega import eager
from fastweights.ops.omega.groups import in_groups
from helpers.omega import Case, shape_of, tensors_of

CASE = Case(batch=2, tokens=300, heads=2, width=5, values=3, chunk_size=16, momentum=False)
CASES = [
    CASE,
    CASE.but(carried=True, window=4),
    CASE.but(batch=1, tokens=256, decay=False, gates=False, window=1),
    CASE.but(tokens=100, read_before=True, carried=True),  # of the groups the last ones are empty
    CASE.but(chunk_size=37, window=17, degree=2, carried=True),
    CASE.but(chunk_size=128, tokens=700, window=2),
    CASE.but(inner_loss="dot", carried=True),
]


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_are_the_whole(case: Case, groups: int) -> None:
    given = case.arguments(0, torch.float64, torch.device("cpu"))
    shape, tensors = shape_of(given), tensors_of(given)
    wanted, state, _ = eager.fwd(shape, tensors)
    y, left, _ = in_groups(shape, tensors, groups, eager.fwd)
    assert y.shape == wanted.shape
    assert left.shape == state.shape
    for got, truth in ((y, wanted), (left, state)):
        assert (got - truth).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case.name)
def test_groups_are_as_many_as_asked_for(case: Case) -> None:
    """Each pass is one call of packed sequences, so that all groups run side by side."""
    given = case.arguments(0, torch.float64, torch.device("cpu"))
    seen = []

    def run(shape: eager.OmegaShape, tensors: eager.OmegaTensors) -> object:
        assert tensors.cu_seqlens is not None
        lengths = tensors.cu_seqlens.diff()
        assert lengths.sum() == case.batch * case.tokens
        assert (lengths % 64 == 0).sum() >= len(lengths) - case.batch
        seen.append((shape.batch, len(lengths), shape.values))
        return eager.fwd(shape, tensors)

    in_groups(shape_of(given), tensors_of(given), 4, run)
    each = 4 * case.batch
    assert seen == [(each, each, case.width + case.values), (each, each, case.values)]
