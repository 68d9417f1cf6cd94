"""Each frame arrives once and in order, whatever connections lose."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.errors import ProtocolError
from paceline.core.window import Window


@dataclass
class End:
    """One end of a line, what it meant to say, and what it has heard."""

    window: Window[int] = field(default_factory=Window)
    said: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    # On their way here: a frame or nothing, and how many its sender had had.
    wire: list[tuple[int | None, int]] = field(default_factory=list)


SIDES = st.sampled_from(["client", "server"])


class Line(RuleBasedStateMachine):
    """Two ends, and a connection that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = {"client": End(), "server": End()}
        self.connected = True

    def other(self, side: str) -> End:
        return self.ends["server" if side == "client" else "client"]

    @rule(side=SIDES)
    def send(self, side: str) -> None:
        end = self.ends[side]
        end.said.append(len(end.said))
        end.window.sending(end.said[-1])
        if self.connected:
            self.other(side).wire.append((end.said[-1], end.window.received))

    @rule(side=SIDES)
    @precondition(lambda self: self.connected)
    def acknowledge(self, side: str) -> None:
        self.other(side).wire.append((None, self.ends[side].window.received))

    @rule(side=SIDES)
    def deliver(self, side: str) -> None:
        end = self.ends[side]
        if end.wire:
            frame, received = end.wire.pop(0)
            if frame is None:
                end.window.acknowledge(received)
            else:
                end.heard.append(frame)
                end.window.arrived(received)

    @rule()
    def lose(self) -> None:
        self.connected = False
        for end in self.ends.values():
            end.wire.clear()

    @rule(told=st.booleans(), resent=st.integers(0, 20))
    @precondition(lambda self: not self.connected)
    def reconnect(self, told: bool, resent: int) -> None:
        """It may be lost again at any point: before the answer, or while frames are sent again."""
        client, server = self.ends["client"], self.ends["server"]
        again = server.window.missing(client.window.received)
        client.wire += [(frame, server.window.received) for frame in again[:resent]]
        if not told:
            # What the server has sent arrives nowhere.
            client.wire.clear()
            return
        again = client.window.missing(server.window.received)
        server.wire += [(frame, client.window.received) for frame in again[:resent]]
        self.connected = resent >= max(len(client.window), len(server.window))
        if not self.connected:
            # Some of it may have come through.
            for side in ("client", "server"):
                for _ in range(len(self.ends[side].wire) // 2):
                    self.deliver(side)
            self.lose()

    @invariant()
    def each_end_has_heard_what_the_other_said_once_and_in_order(self) -> None:
        for side, end in self.ends.items():
            assert end.heard == self.other(side).said[: len(end.heard)]
            assert end.window.received == len(end.heard)
            assert end.window.sent == len(end.said)
            # It keeps all that may be lost, and nothing that has been acknowledged.
            assert len(end.said) - len(end.window) <= len(self.other(side).heard)

    def teardown(self) -> None:
        self.lose()
        self.reconnect(True, 10_000)
        for side, end in self.ends.items():
            while end.wire:
                self.deliver(side)
            assert end.heard == self.other(side).said
        for side in self.ends:
            self.acknowledge(side)
        for side, end in self.ends.items():
            while end.wire:
                self.deliver(side)
            assert len(end.window) == 0


TestLine = Line.TestCase
TestLine.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)


def test_what_cannot_have_arrived_is_refused() -> None:
    window: Window[str] = Window()
    window.sending("a")
    window.sending("b")
    assert window.missing(1) == ["b"]
    with pytest.raises(ProtocolError, match=r"^3 frames were acknowledged, 2 were sent$"):
        window.arrived(3)
    with pytest.raises(ProtocolError, match=r"^3 frames were acknowledged, 2 were sent$"):
        window.missing(3)
    with pytest.raises(ProtocolError, match=r"^0 frames are said to have arrived, it was 1$"):
        window.missing(0)


def test_an_acknowledgement_that_comes_late_changes_nothing() -> None:
    window: Window[str] = Window()
    for frame in "abc":
        window.sending(frame)
    window.acknowledge(2)
    window.acknowledge(1)
    window.arrived(0)
    assert window.missing(2) == ["c"]
    assert (window.sent, window.received, len(window)) == (3, 1, 1)
