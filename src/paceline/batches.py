"""What a trainer gets: items stacked, each with its stamp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.adapters.base import adapter
from paceline.core import messages as m
from paceline.core import versions
from paceline.core.padding import unpadded
from paceline.core.stacking import row
from paceline.core.tree import child
from paceline.packing import stacked, stacked_with_pad, views
from paceline.transports.base import Memory

D = TypeVar("D")


@dataclass(frozen=True, slots=True, repr=False)
class Batch(Generic[D]):
    """`n` items. It owns its memory, which may be written, unless it was taken without a copy.

    Attributes:
        data: the items stacked: leaves `[*shape]` are `[n, *shape]`, numbers `[n]`, other plain
            values lists of `n`. Where the items' shapes differ, or were not copied, a list of `n`
            trees.
        version: int64 `[n]`, the version each item was made with; -1 where it has no stamp.
        lag: int64 `[n]`, versions assigned since then when the batch was handed over; empty where
            nothing is stamped.
        worker: the task that made each item, such as `worker:0`.
        metrics: for each name that workers logged, all values as float64, in item order.
        layout: the structure that all items share; `None` where `data` is a list of trees.
        shapes: where the batch was padded, a tree like `data`: for each array the sizes of each
            item's own, int64 `[n, rank]`; for plain values `None`. Else `None`.
    """

    data: D
    version: NDArray[np.int64]
    lag: NDArray[np.int64]
    worker: tuple[str, ...]
    metrics: dict[str, NDArray[np.float64]]
    layout: bytes | None = None
    shapes: Any = None

    @property
    def count(self) -> NDArray[np.int64]:
        """int64 `[n]`, the assigns in its epoch up to each item's version; -1 without a stamp.

        What `Snapshot.count` is for the snapshot that the item was made with.
        """
        return np.where(self.version < 0, -1, versions.count_of(self.version))

    def items(self) -> list[Any]:
        """The items one by one, in their true shapes; arrays are views of this batch's memory.

        A batch of items whose shapes may differ is read in this way: `data` is a list only when
        they do.
        """
        if self.layout is None:
            assert isinstance(self.data, list)
            return list(self.data)
        rows = [row(self.layout, self.data, place) for place in range(len(self))]
        if self.shapes is None:
            return rows
        return [unpadded(item, self.shapes, place) for place, item in enumerate(rows)]

    def __len__(self) -> int:
        return len(self.worker)

    def __repr__(self) -> str:
        made = sorted({int(n) for n in self.count if n >= 0})
        lag = f", lag <= {self.lag.max()}" if self.lag.size else ""
        return f"<Batch of {len(self)} items, versions {made}{lag}>"

    def to(self, framework: str, device: Any = None) -> Batch[Any]:
        """The same batch with the framework's arrays, such as `to("torch", device="cuda")`.

        On the processor torch's tensors use this batch's memory: what writes one writes the other.
        JAX's arrays are copies; 64 bits become 32 unless `jax_enable_x64` is set.

        Raises:
            UnknownName: there is no adapter for that framework.
            Unsupported: the framework is not installed, or has no such device.
            SchemaError: it has no such dtype; the message names the leaf.
        """
        found = adapter(framework)

        def moved(node: Any, path: str) -> Any:
            if isinstance(node, np.ndarray):
                return found.to_device(node, device, path=path)
            if isinstance(node, dict):
                return {key: moved(part, child(path, key)) for key, part in node.items()}
            if isinstance(node, (list, tuple)):
                return type(node)(moved(part, child(path, i)) for i, part in enumerate(node))
            return node

        return replace(self, data=moved(self.data, "$"))


def assembled(items: m.Items, memories: Sequence[Memory | None]) -> Batch[Any]:
    """The batch of a delivery."""
    return _batch(items, stacked(items.runs, memories))


def lent(items: m.Items, memories: Sequence[Memory | None]) -> Batch[Any]:
    """The batch of a delivery, whose items are read-only views of their makers' memory."""
    return replace(_batch(items, views(items.runs, memories)), layout=None)


def padded(items: m.Items, memories: Sequence[Memory | None], *, pad: Any, what: str) -> Batch[Any]:
    """The batch of a delivery, its arrays padded to the largest; raises as `stack_padded`."""
    data, shapes = stacked_with_pad(items.runs, memories, pad, what)
    return replace(_batch(items, data), layout=items.runs[0].layout, shapes=shapes)


def _batch(items: m.Items, data: Any) -> Batch[Any]:
    heads = items.runs
    counts = [head.count for head in heads]
    logs = [log for head in heads for log in head.metrics]
    return Batch(
        data=data,
        layout=heads[0].layout if len({head.layout for head in heads}) == 1 else None,
        version=np.repeat(np.array([head.version for head in heads], np.int64), counts),
        lag=np.repeat(np.array(items.lags, np.int64), counts if items.lags else 0),
        worker=tuple(chain.from_iterable(map(repeat, items.producers, counts))),
        metrics={
            name: np.array([value for log in logs for value in log.get(name, ())], np.float64)
            for name in sorted({name for log in logs for name in log})
        },
    )
