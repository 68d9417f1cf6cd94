"""Which peers there are, what is measured with each, and in which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KB, MB = 1 << 10, 1 << 20

Config = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A program `with_NAME.py`, and the file of pins of its environment, if it needs one.

    Attributes:
        works: what is measured with it.
        versions: the packages whose versions are reported.
        views: whether it has the newest version in place, without a copy.
        cores: whether its processes may be bound to cores without doing it harm.
    """

    works: str
    pins: str = ""
    versions: str = ""
    views: bool = False
    cores: bool = False


PEERS = {
    "nothing": Peer("call publish push tcp", views=True, cores=True),
    "multiprocessing": Peer("call publish queue collect start memory", views=True),
    "tensorflow": Peer(
        "call publish push queue collect tcp start memory", "tensorflow", "tensorflow-cpu grpcio"
    ),
    "ray": Peer("call publish push queue collect start memory", "ray", "ray", views=True),
    "torch_rpc": Peer("call publish push start memory", "torch", "torch"),
    "torch_mp": Peer("publish queue collect", "torch", "torch", views=True),
    "faster_fifo": Peer("queue collect", "faster_fifo", "faster-fifo"),
    "reverb": Peer("queue collect", "reverb", "dm-reverb tensorflow-cpu"),
    "grpc": Peer("call publish tcp", "grpc", "grpcio"),
    "zmq": Peer("call publish tcp queue collect", "zmq", "pyzmq"),
}
NO_INSTALLATION = [name for name, peer in PEERS.items() if not peer.pins]
WORKS = "call publish push queue collect tcp start memory".split()
LIKE = {"collect": "queue"}
"""Works of paceline beside which peers do another one of theirs."""
ALONE = {"publish": [{"nbytes": 1024 * MB, "readers": 1, "mode": mode} for mode in ("own", "view")]}
"""What only paceline and the limits do."""


def configs(work: str, name: str, *, quick: bool) -> list[Config]:
    """What to measure of a work with a peer, small before large."""
    peer = PEERS[name]
    if work == "call":
        seconds = 0.02 if quick else 0.5
        where = ("free", "one", "two") if peer.cores else ("free",)
        return [{"cores": cores, "seconds": seconds} for cores in where]
    if work == "publish":
        sizes = (KB, MB) if quick else (KB, MB, 64 * MB, 512 * MB)
        readers = (1, 2) if quick else (1, 2, 4, 8)
        modes = ("own", "view") if peer.views else ("own",)
        found = [
            {"nbytes": nbytes, "readers": many, "mode": mode}
            for nbytes in sizes
            for many in readers
            for mode in modes
        ]
        return found + ([] if quick or name != "nothing" else ALONE["publish"])
    if work == "push":
        return [{"nbytes": (1 if quick else 64) * MB, "seconds": 0.02 if quick else 0.5}]
    if work == "queue":
        return [{**each, "seconds": 0.02 if quick else 0.4} for each in queues(quick=quick)]
    if work == "collect":
        sizes = (64,) if quick else (64, 256 * KB)
        each = {"producers": 2, "at_once": 1, "kind": "items", "seconds": 0.02 if quick else 0.4}
        return [{"nbytes": nbytes, **each} for nbytes in sizes]
    if work == "tcp":
        return [{"nbytes": (1 if quick else 64) * MB}]
    return [{}]


def queues(*, quick: bool) -> list[Config]:
    """Items of each size, by one and by several producers, one or more at once."""
    several = [(64, 100), (4 * KB, 32), (256 * KB, 8), (4 * MB, 1)]
    found = [(nbytes, 2, 1, "items") for nbytes in (64, 256 * KB)]
    found += [
        (nbytes, producers, at_once, "items")
        for nbytes, at_once in several
        for producers in (1, 2, 4)
    ]
    found.append((64, 2, 100, "stacked"))
    if quick:
        found = [(64, 2, 10, "items"), (64, 1, 10, "stacked"), (256 * KB, 1, 1, "items")]
    names = ("nbytes", "producers", "at_once", "kind")
    return [dict(zip(names, each, strict=True)) for each in found]
