"""Batches against a loop that writes one element at a time."""

import random
from dataclasses import fields

import pytest
import torch

from rollout.errors import InvalidArgumentError
from rollout.training.batch import NO_VERSION, Batch
from rollout.types import Trajectory
from tests.examples.trajectories import random_trajectories, trajectory

COLUMNS = [field.name for field in fields(Batch)]


def by_hand(trajectories: list[Trajectory]) -> Batch:
    width = max(len(one.prompt_ids) + len(one.output_ids) for one in trajectories)
    rows: dict[str, list[list[float]]] = {name: [] for name in COLUMNS}
    for one in trajectories:
        versions = [run.version for run in one.versions for _ in range(run.tokens)]
        cells: list[tuple[float, ...]] = [(token, True, False, 0.0, NO_VERSION) for token in one.prompt_ids]
        for token, logprob, version in zip(one.output_ids, one.logprobs, versions, strict=True):
            sampled = version is not None
            cells.append((token, True, sampled, logprob, version if version is not None else NO_VERSION))
        cells += [(0, False, False, 0.0, NO_VERSION)] * (width - len(cells))
        for name, column in zip(COLUMNS, zip(*cells, strict=True), strict=True):
            rows[name].append(list(column))
    dtypes = (torch.int64, torch.bool, torch.bool, torch.float32, torch.int64)
    return Batch(**{name: torch.tensor(rows[name], dtype=dtype) for name, dtype in zip(COLUMNS, dtypes, strict=True)})


def assert_same(one: Batch, other: Batch) -> None:
    for name in COLUMNS:
        found, expected = getattr(one, name), getattr(other, name)
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("seed", range(8))
def test_every_column_is_aligned_with_the_ids(seed: int) -> None:
    trajectories = random_trajectories(seed, [3, 1, 2])
    batch = Batch.of(trajectories)
    assert_same(batch, by_hand(trajectories))
    assert len(batch) == len(trajectories)
    assert batch.width == max(len(one.prompt_ids) + len(one.output_ids) for one in trajectories)
    assert batch.sampled_tokens == sum(one.sampled_tokens for one in trajectories)


def test_a_trajectory_without_output_has_nothing_to_train_on() -> None:
    batch = Batch.of(
        [trajectory(random.Random(0), "0/0", [5, 6], []), trajectory(random.Random(0), "0/1", [5], [(2, 1)])]
    )
    assert batch.mask_BS.tolist() == [[False, False], [False, True]]
    assert batch.attention_BS.all()
    assert batch.versions_BS.tolist() == [[NO_VERSION, NO_VERSION], [NO_VERSION, 2]]


def test_no_trajectories_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got none"):
        Batch.of([])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("within", [None, slice(0, 7), slice(2, 5), slice(6, 7)])
def test_pieces_have_each_row_once_and_are_batches_of_their_own(seed: int, rows: int, within: slice | None) -> None:
    trajectories = random_trajectories(seed, [3, 1, 3])
    seen: list[int] = []
    for place, piece in Batch.of(trajectories).split(rows, within):
        assert_same(piece, by_hand(trajectories[place]))
        assert 1 <= len(piece) <= rows
        seen += range(place.start, place.stop)
    assert seen == list(range(*(within or slice(7)).indices(7)))


def test_rows_drop_padding_that_none_of_them_needs() -> None:
    draw = random.Random(0)
    trajectories = [trajectory(draw, f"0/{tokens}", [9], [(0, tokens)]) for tokens in (2, 8, 3)]
    batch = Batch.of(trajectories)
    assert [batch.rows(first, first + 1).width for first in range(3)] == [3, 9, 4]
    assert batch.rows(0, 3).width == batch.width == 9


def test_moving_to_where_it_is_changes_nothing() -> None:
    batch = Batch.of(random_trajectories(0, [2]))
    assert_same(batch.to("cpu"), batch)
