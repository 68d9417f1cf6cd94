"""Peers that keep OpenSSL busy with what is no data: a server looks at a little of it at a time."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from calls import DEADLINE_SECONDS, Call, until
from certified import files
from test_tls import opened, serving, stranger
from wires import SECRET

from paceline.core.handshake import ANSWER, CHALLENGE, VERDICT, ClientSide
from paceline.transports.greeting import AFTERWARDS, MOST
from paceline.transports.tls import binding

NAME = ctypes.util.find_library("ssl")
MANY = 1 << 30
"""More than a server can look at within the limit of a test."""

pytestmark = pytest.mark.skipif(NAME is None, reason="no libssl beside Python")


class Keys:
    """A client that does with TLS what Python's own does not: it says new keys, over and over."""

    def __init__(self, place: str) -> None:
        self.changed = 0
        self._library = library = ctypes.CDLL(NAME)
        pointer = ctypes.c_void_p
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(library, name).restype = pointer
        self._sock = stranger(place)
        self._sock.settimeout(None)
        self._context = pointer(library.SSL_CTX_new(pointer(library.TLS_client_method())))
        self._tls = pointer(library.SSL_new(self._context))
        library.SSL_set_fd(self._tls, self._sock.fileno())
        assert library.SSL_connect(self._tls) == 1

    def prove(self, certificate: bytes) -> None:
        client = ClientSide(SECRET, os.urandom(32), binding(certificate))
        answer = client.answer(self._read(CHALLENGE))
        assert len(answer) == ANSWER == self._library.SSL_write(self._tls, answer, ANSWER)
        client.check(self._read(VERDICT))

    def _read(self, size: int) -> bytes:
        room = ctypes.create_string_buffer(size)
        assert self._library.SSL_read(self._tls, room, size) == size
        return room.raw

    def change(self, times: int, stop: threading.Event) -> int:
        """Say new keys that often, or until the server hangs up, or `stop`; how often it was."""
        for number in range(times):
            self.changed = number
            if stop.is_set() or self._library.SSL_key_update(self._tls, 1) != 1:
                return number
            if self._library.SSL_do_handshake(self._tls) != 1:
                return number
        return times

    def close(self) -> None:
        self._library.SSL_free(self._tls)
        self._library.SSL_CTX_free(self._context)
        self._sock.close()


@contextmanager
def keys(place: str) -> Iterator[Keys]:
    made = Keys(place)
    try:
        yield made
    finally:
        made.close()


def test_a_stranger_has_few_bytes_to_prove_itself_in(tmp_path: Path) -> None:
    with serving(files(tmp_path, ca=None)) as (place, notes), keys(place) as one:
        assert one.change(MANY, threading.Event()) < MANY
        until(lambda: notes)
    found = re.match(
        r"^refused a connection: the peer has said (\d+) bytes and not proved itself; (\d+) will"
        r" do$",
        notes[0],
    )
    assert found is not None
    said, will_do = int(found[1]), int(found[2])
    assert AFTERWARDS < will_do < said <= will_do + AFTERWARDS
    assert will_do < MOST


def test_a_peer_that_says_new_keys_without_end_holds_nobody_up(tmp_path: Path) -> None:
    tls = files(tmp_path, ca=None)
    certificate = ssl.PEM_cert_to_DER_cert((tmp_path / "server.pem").read_text())
    stop = threading.Event()
    with serving(tls) as (place, _), opened(place, files(tmp_path, None)) as session:
        counter = session.counter("c")
        with keys(place) as one, keys(place) as two:
            for each in (one, two):
                each.prove(certificate)
            changing = [Call(each.change, MANY, stop) for each in (one, two)]
            until(lambda: counter.add() > 10 and min(one.changed, two.changed) > 100)
            began = time.monotonic()
            for _ in range(20):
                counter.add()
            took = time.monotonic() - began
            stop.set()
            for call in changing:
                call.outcome()
    assert took < DEADLINE_SECONDS / 3
