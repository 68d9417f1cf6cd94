"""A live server under attack while honest clients work; `make fuzz` does it for long."""

from __future__ import annotations

import os
import threading

import pytest
from calls import Call, until
from fuzz.attack import Attacker
from fuzz.honest import give, take
from wires import SECRET, serve

from paceline import Session
from paceline.transports.tcp import TcpListener
from paceline.transports.unix import UnixListener

FRAMES = 1000


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_broken_frames_harm_nobody_but_their_sender(seed: int) -> None:
    beside, far = UnixListener(f"@paceline-fuzz-{os.getpid()}"), TcpListener("127.0.0.1:0")
    targets = [f"unix:{beside.place}", f"tcp:{far.place}"]
    notes: list[str] = []
    attacker = Attacker(targets, SECRET, seed, 0)
    stop = threading.Event()
    with serve(beside, far, linger=0.2, on_note=notes.append) as server:
        with (
            Session(targets[0], secret=SECRET, job="worker") as one,
            Session(targets[1], secret=SECRET, job="worker") as two,
        ):
            giving = Call(lambda: give(one, stop, spread=False))
            taking = Call(lambda: take(two, spread=False))
            try:
                attacker.run(FRAMES, threading.Event())
            finally:
                stop.set()
            assert not attacker.failures, "\n".join(attacker.failures)
            assert giving.outcome()["given"] == taking.outcome()["taken"] > 0
            until(lambda: [peer.name for peer in server.service.peers()] == [one.task, two.task])
    assert attacker.told["frames"] >= FRAMES
    assert attacker.told["cut off"] > 10
    assert not [note for note in notes if "after an error" in note]
