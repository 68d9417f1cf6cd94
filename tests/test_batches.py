"""Batches: stacked items, their stamps, and the way to a framework."""

import numpy as np
import pytest
import torch

from paceline.batches import Batch
from paceline.core.errors import UnknownName
from paceline.session import Session


def batch(items: list[object], **options: int) -> Batch[object]:
    with Session() as session:
        queue = session.queue("q", len(items))
        queue.enqueue_many(items, **options)
        return queue.dequeue_many(len(items), timeout=5)


def test_leaves_gain_a_leading_axis_and_keep_their_dtype() -> None:
    made = batch([{"obs": np.full((3, 2), n, np.float32), "r": float(n)} for n in range(4)])
    data = made.data
    assert isinstance(data, dict)
    assert data["obs"].shape == (4, 3, 2)
    assert data["obs"].dtype == np.float32
    assert data["obs"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert data["r"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_batch_counts_versions_as_snapshots_do() -> None:
    with Session() as session:
        variable, queue = session.variable("v", 0), session.queue("q", 3)
        queue.enqueue("without a stamp")
        for n in range(2):
            queue.enqueue("with one", version=variable.assign(n))
        made = queue.dequeue_many(3, timeout=5)
        assert made.count.tolist() == [-1, 2, 3]
        assert made.count[2] == variable.read().count
        assert made.version[2] == variable.version
        assert repr(made) == "<Batch of 3 items, versions [2, 3]>"


def test_other_plain_values_become_lists() -> None:
    data = batch([{"name": f"n{n}", "done": n == 1, "none": None} for n in range(2)]).data
    assert isinstance(data, dict)
    assert data["name"] == ["n0", "n1"]
    assert data["none"] == [None, None]
    assert data["done"].tolist() == [False, True]


def test_a_batch_owns_memory_that_may_be_written() -> None:
    data = batch([np.arange(5000) for _ in range(2)]).data
    assert isinstance(data, np.ndarray)
    data[:] = 7
    assert data.base is None or data.base.flags.owndata


@pytest.mark.parametrize(
    "items",
    [
        [np.zeros(3), np.zeros(4)],
        [np.zeros(3), np.zeros(3, np.float32)],
        [{"a": 1}, {"b": 1}],
        [np.zeros(10_000), "text"],
    ],
    ids=["shapes", "dtypes", "keys", "kinds"],
)
def test_items_that_differ_come_as_a_list(items: list[object]) -> None:
    data = batch(items).data
    assert isinstance(data, list)
    assert len(data) == 2
    for found, item in zip(data, items, strict=True):
        assert type(found) is type(item)
        if isinstance(item, np.ndarray):
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found, item)
            assert found.dtype == item.dtype
            assert found.flags.writeable


def test_stamps_and_makers_come_with_the_items() -> None:
    with Session(job="worker", index=2) as session:
        queue = session.queue("q", 4)
        queue.enqueue(np.zeros(2), version=7)
        queue.enqueue(np.zeros(2))
        made = queue.dequeue_many(2)
    assert made.version.dtype == np.int64
    assert made.version.tolist() == [7, -1]
    assert made.worker == ("worker:2", "worker:2")
    assert len(made) == 2
    assert made.metrics == {}


def test_to_torch_shares_the_batchs_memory() -> None:
    made = batch([{"x": np.zeros(3, np.float32), "tag": "a"} for _ in range(2)], version=3)
    there = made.to("torch")
    assert torch.is_tensor(there.data["x"])
    assert there.data["x"].shape == (2, 3)
    assert there.data["tag"] == ["a", "a"]
    assert there.version.tolist() == [3, 3]
    there.data["x"][:] = 5
    data = made.data
    assert isinstance(data, dict)
    assert data["x"].tolist() == [[5] * 3] * 2


def test_to_keeps_lists_and_tuples() -> None:
    there = batch([(np.zeros(2), [np.ones(3)]), (np.zeros(2), [np.ones(4)])]).to("torch")
    assert [type(item) for item in there.data] == [tuple, tuple]
    assert there.data[1][1][0].shape == (4,)


def test_an_unknown_framework_names_those_there_are() -> None:
    with pytest.raises(UnknownName, match=r"^no adapter 'caffe'; there are \["):
        batch([1]).to("caffe")


def test_a_batch_shows_its_versions() -> None:
    assert repr(batch([1, 2], version=(5 << 31) + 9)) == "<Batch of 2 items, versions [9]>"
