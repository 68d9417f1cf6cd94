"""A live server under attack while honest clients work; `make fuzz` does it for long."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from calls import Call, until
from certified import files
from fuzz.attack import Attacker
from fuzz.honest import give, take
from fuzz.sealed import SealedAttacker
from wires import SECRET, serve

from paceline import Session, Tls
from paceline.transports.tcp import TcpListener
from paceline.transports.unix import UnixListener

FRAMES = 1000


SEEDS = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_frames_harm_nobody_but_their_sender(seed: int) -> None:
    beside, far = UnixListener(f"@paceline-fuzz-{os.getpid()}"), TcpListener("127.0.0.1:0")
    targets = [f"unix:{beside.place}", f"tcp:{far.place}"]
    attacked([beside, far], targets, None, Attacker(targets, SECRET, seed, 0), FRAMES)


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_tls_harms_nobody_but_its_sender(tmp_path: Path, seed: int) -> None:
    tls = files(tmp_path, ca=None)
    called = Tls(ca=tmp_path / "ca.pem")
    far = TcpListener("127.0.0.1:0", tls=tls)
    target = f"tcp:{far.place}"
    attacker = SealedAttacker([target], SECRET, seed, 0, called.client())
    attacked([far], [target, target], called, attacker, FRAMES)
    assert attacker.told["of TLS"] > 20


def attacked(
    listeners: list[Any], targets: list[str], tls: Tls | None, attacker: Attacker, frames: int
) -> None:
    """Have honest clients work while it attacks."""
    notes: list[str] = []
    stop = threading.Event()
    with serve(*listeners, linger=0.2, on_note=notes.append) as server:
        with (
            Session(targets[0], secret=SECRET, job="worker", tls=tls) as one,
            Session(targets[1], secret=SECRET, job="worker", tls=tls) as two,
        ):
            giving = Call(lambda: give(one, stop, spread=False))
            taking = Call(lambda: take(two, spread=False))
            try:
                attacker.run(frames, threading.Event())
            finally:
                stop.set()
            assert not attacker.failures, "\n".join(attacker.failures)
            assert giving.outcome()["given"] == taking.outcome()["taken"] > 0
            until(lambda: [peer.name for peer in server.service.peers()] == [one.task, two.task])
    assert attacker.told["frames"] >= frames
    assert attacker.told["cut off"] > 10
    assert not [note for note in notes if "after an error" in note]
