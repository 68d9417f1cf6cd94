"""A pickle that would run something is bytes like any other, wherever bytes travel."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import until

from paceline.core import messages as m
from paceline.core.codec import PREFIX, PROTOCOL, REQUEST
from paceline.core.errors import PacelineError
from paceline.core.handshake import CHALLENGE
from paceline.testing import Serving, serving
from paceline.transports import tcp
from paceline.transports.base import Address, Frame, HeapArena
from paceline.transports.tcp import host_and_port


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def bomb(mark: Path) -> bytes:
    made = pickle.dumps(Hostile(mark))
    pickle.loads(made)
    assert mark.exists()
    mark.rmdir()
    return made


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving("tcp", where="thread") as made:
        yield made


def test_in_the_place_of_a_handshake(server: Serving, bomb: bytes, mark: Path) -> None:
    place = Address.parse(server.target).place
    with socket.create_connection(host_and_port(place)) as sock:
        sock.recv(CHALLENGE)
        sock.sendall(bomb * 2)
        until(lambda: server.notes)
    assert not mark.exists()


@pytest.mark.parametrize("part", ["prefix", "header", "envelope", "buffer"])
def test_in_each_part_of_a_frame(server: Serving, bomb: bytes, mark: Path, part: str) -> None:
    channel = tcp.connect(Address.parse(server.target).place, server.secret, 5.0)
    if part == "prefix":
        channel._sock.sendall(bomb + bytes(PREFIX.size))
    elif part == "header":
        channel.send(Frame(REQUEST, 1, bomb))
    elif part == "envelope":
        prefix = PREFIX.pack(PROTOCOL, REQUEST, 0, 1, len(bomb), 0, 0, 1, 0)
        channel._sock.sendall(prefix + b"x" + bomb)
    else:
        block = HeapArena().allocate(len(bomb))
        block.view()[:] = bomb
        channel.send(Frame(REQUEST, 1, m.encode(m.Stats()), [block]))
    until(lambda: server.notes)
    channel.close()
    assert not mark.exists()


def test_as_a_name_a_value_an_array_and_an_item(server: Serving, bomb: bytes, mark: Path) -> None:
    one, two = server.session(), server.session()
    tree = {"bytes": bomb, "array": np.frombuffer(bomb, np.uint8), "void": np.array([bomb])}
    one.variable("v", tree)
    found = two.variable("v").read().tree
    assert found["bytes"] == bomb == found["array"].tobytes()
    one.queue("q", 2).enqueue(tree)
    assert two.queue("q", 2).dequeue()["bytes"] == bomb
    with suppress(PacelineError):
        one.variable(bomb.decode("latin-1")[:200].replace("\0", "x"), 1)
    one.request_stop(repr(bomb))
    assert not mark.exists()


def test_what_could_not_travel_without_a_pickle_does_not_travel(
    server: Serving, mark: Path
) -> None:
    session = server.session()
    for value in (Hostile(mark), np.array([Hostile(mark)], object)):
        with pytest.raises(PacelineError, match=r"^(variable .*|)leaf \$ is an? "):
            session.variable("v", value)
    assert not mark.exists()
