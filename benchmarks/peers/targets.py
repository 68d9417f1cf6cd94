"""What is aimed at beside each peer, and whether kept results reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from peers.plan import KB, MB

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """One row: how many times better paceline is than a peer, or a figure of its own.

    `bound` is `>= n` or `<= n`; `found` is `None` where it was not measured, `low` and `high` are
    the smallest and the largest of the rounds.
    """

    work: str
    beside: str
    bound: str
    found: float | None
    low: float | None = None
    high: float | None = None

    @property
    def reached(self) -> str:
        """For a table."""
        if self.found is None:
            return "not measured"
        sign, bound = self.bound.split()
        good = self.found >= float(bound) if sign == ">=" else self.found <= float(bound)
        return "yes" if good else "no"


def find(records: Records, work: str, peer: str, **config: Any) -> dict[str, Any] | None:
    """The figure of a work with a peer, in the size that `config` has."""
    for each in records:
        same = each["work"] == work and each["peer"] == peer and "failed" not in each
        if same and config.items() <= each["config"].items():
            return each
    return None


NAMES = {
    "nothing": "the limit",
    "multiprocessing": "multiprocessing",
    "tensorflow": "TensorFlow",
    "ray": "Ray",
    "torch_rpc": "torch.distributed.rpc",
    "torch_mp": "torch.multiprocessing",
    "faster_fifo": "faster-fifo",
    "reverb": "Reverb",
    "grpc": "gRPC",
    "zmq": "ZeroMQ",
}


def targets(records: Records) -> list[Target]:
    """All rows, in the order of the works."""

    def row(
        what: str, beside: str, bound: float, work: str, peer: str, key: str, **config: Any
    ) -> Target:
        found = find(records, work, peer, **config)
        ratio = found["ratio"].get(key) if found else None
        if ratio is None:
            return Target(what, beside, f">= {bound:g}", None)
        return Target(what, beside, f">= {bound:g}", ratio["median"], ratio["low"], ratio["high"])

    return [
        *_calls(row),
        *_published(row),
        *_own(records),
        row("64 MB added on the server", "TensorFlow", 3, "push", "tensorflow", "seconds"),
        row("64 MB added on the server", "np.add in place", 0.3, "push", "nothing", "seconds"),
        *_queues(row),
        row("64 MB over TCP, both ways", "TensorFlow", 1.5, "tcp", "tensorflow", "seconds"),
        row("64 MB over TCP, assign", "a raw socket", 0.8, "tcp", "nothing", "publish"),
        row("64 MB over TCP, read_into", "a raw socket", 0.8, "tcp", "nothing", "read"),
        row("start of 4 workers", "ray.init alone", 2, "start", "ray", "seconds"),
    ]


def _calls(row: Callable[..., Target]) -> Iterator[Target]:
    for peer, bound in (("tensorflow", 20), ("ray", 20), ("torch_rpc", 5)):
        yield row("scalar read", NAMES[peer], bound, "call", peer, "seconds", cores="free")
    for cores, where in (("one", "both ends on one core"), ("two", "across cores")):
        yield row(
            f"scalar read, {where}", "a raw Unix socket", 0.5, "call", "nothing", "seconds",
            cores=cores,
        )  # fmt: skip


def _published(row: Callable[..., Target]) -> Iterator[Target]:
    size = 64 * MB
    for peer, bound, mode in (
        ("tensorflow", 4, "own"),
        ("torch_rpc", 4, "own"),
        ("ray", 2, "own"),
        ("ray", 2, "view"),
    ):
        how = "into own memory" if mode == "own" else "as a view"
        yield row(
            f"64 MB published and read {how}", NAMES[peer], bound, "publish", peer, "seconds",
            nbytes=size, readers=1, mode=mode,
        )  # fmt: skip
    for nbytes, name in ((size, "64 MB"), (1024 * MB, "1 GB")):
        for key, what in (("publish", "assign"), ("read", "read_into")):
            yield row(
                f"{what} of {name}", "memcpy", 0.75, "publish", "nothing", key,
                nbytes=nbytes, readers=1, mode="own",
            )  # fmt: skip


def _own(records: Records) -> Iterator[Target]:
    """Of paceline alone: what more readers cost, in time and in memory."""

    def view(nbytes: int, readers: int) -> Any:
        found = find(records, "publish", "nothing", nbytes=nbytes, readers=readers, mode="view")
        return found and found["ours"]

    one, eight = view(64 * MB, 1), view(64 * MB, 8)
    yield Target(
        "64 MB published, and 8 readers have it in view", "1 reader", "<= 1.5",
        eight["seconds"] / one["seconds"] if one and eight else None,
    )  # fmt: skip
    less, more = view(64 * MB, 8), view(512 * MB, 8)
    # The publisher's own array grows too. The version before is kept, to be used again.
    grown = (more["resident"] - less["resident"]) / ((512 - 64) * MB) - 1 if less and more else None
    yield Target("memory of all processes, 8 readers", "copies of the variable", "<= 2.1", grown)


def _queues(row: Callable[..., Target]) -> Iterator[Target]:
    for nbytes, peer, bound in (
        (256 * KB, "ray", 50),
        (256 * KB, "tensorflow", 20),
        (256 * KB, "multiprocessing", 8),
        (256 * KB, "faster_fifo", 1.2),
        (64, "faster_fifo", 1),
    ):
        size = "256 KB" if nbytes > 64 else "64 B"
        yield row(
            f"{size} items, 2 producers, collected one by one", NAMES[peer], bound, "collect", peer,
            "rate", nbytes=nbytes,
        )  # fmt: skip
    for at_once in (1, 8):
        for peer, bound in (
            ("ray", 50), ("tensorflow", 20), ("multiprocessing", 8), ("faster_fifo", 1.2)
        ):  # fmt: skip
            yield row(
                f"256 KB items, 2 producers, {at_once} at once", NAMES[peer], bound, "queue", peer,
                "rate", nbytes=256 * KB, producers=2, at_once=at_once, kind="items",
            )  # fmt: skip
    for at_once in (1, 100):
        yield row(
            f"64 B items, 2 producers, {at_once} at once", NAMES["faster_fifo"], 1, "queue",
            "faster_fifo", "rate", nbytes=64, producers=2, at_once=at_once, kind="items",
        )  # fmt: skip
