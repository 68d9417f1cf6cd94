"""The smaller pure parts: variables, members, versions, clocks, the handshake, frames, parking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import codec, versions
from paceline.core import messages as m
from paceline.core.arithmetic import add, add_values
from paceline.core.clock import ManualClock, checked_timeout
from paceline.core.errors import (
    PacelineError,
    ProtocolError,
    Refused,
    SchemaError,
    TimedOut,
    UnknownName,
)
from paceline.core.handshake import NONCE, VERDICT, ClientSide, ServerSide
from paceline.core.member_state import MemberState
from paceline.core.tree import flatten
from paceline.core.variable_state import VariableState
from paceline.core.waiting import NOT_YET, Stored
from paceline.server.parking import Parked, Parking


def stored(tree: Any) -> Stored:
    flat = flatten(tree)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    return Stored(flat.layout, list(flat.values), block)


# Variables


def test_the_first_value_initialises_and_a_later_one_is_not_taken() -> None:
    state = VariableState("v", 3)
    assert state.defined() is NOT_YET
    assert state.read(-1) is NOT_YET
    first = stored([1])
    assert state.define(first) is True
    assert state.define(stored([2])) is False
    assert state.read(-1) == (versions.first(3) + 1, first)
    assert state.define(stored([2]), overwrite=True) is True
    with pytest.raises(SchemaError, match=r"^variable 'v': leaf \$\[0\] is str, declared int$"):
        state.define(stored(["x"]))


def test_versions_grow_by_one_and_a_read_waits_for_a_newer_one() -> None:
    state = VariableState("v", 0)
    state.define(stored(1))
    seen = [state.assign(stored(i)) for i in range(3)]
    assert seen == [2, 3, 4]
    assert state.read(3) is not NOT_YET
    assert state.read(4) is NOT_YET
    with pytest.raises(SchemaError, match=r"^assign 'v': leaf \$ is float, declared int$"):
        state.assign(stored(1.0))
    assert state.version == 4


def test_while_a_sum_is_computed_others_write_later() -> None:
    state = VariableState("v", 0)
    assert state.begin_add(stored(1)) is NOT_YET
    state.define(stored(1))
    assert state.begin_add(stored(1)) is state.stored
    assert state.begin_add(stored(1)) is NOT_YET
    assert state.assign(stored(5)) is NOT_YET
    assert state.define(stored(5), overwrite=True) is NOT_YET
    assert state.end_add(None) == 1
    assert state.assign(stored(5)) == 2
    with pytest.raises(SchemaError, match=r"^assign_add 'v': leaf \$ is str, declared int$"):
        state.begin_add(stored("x"))


def test_sums_find_leaves_by_path_and_keep_dtypes() -> None:
    a = stored({"x": np.ones(3, np.float32), "n": 2, "s": "keep"})
    b = stored({"s": "", "n": 5, "x": np.full(3, 2, np.float32)})
    out = np.zeros_like(a.memory)
    add(a.layout, a.memory, b.layout, b.memory, out)
    np.testing.assert_array_equal(out[:12].view(np.float32), [3, 3, 3])
    assert add_values(a.layout, a.values, b.layout, b.values) == [7, "keep"]
    odd = stored({"flag": np.array([True])})
    with pytest.raises(SchemaError, match=r"^assign_add: leaf \$\.flag is bool, which cannot"):
        add(odd.layout, odd.memory, odd.layout, odd.memory, np.zeros_like(odd.memory))


# Versions, members, clocks


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(0, 1000))
def test_lag_counts_within_an_epoch_and_is_never_negative(epoch: int, a: int, b: int) -> None:
    now, then = versions.first(epoch) + a, versions.first(epoch) + b
    assert versions.lag(now, then) == max(0, a - b)
    assert versions.lag(versions.first(epoch + 1) + a, then) is None
    assert (versions.epoch_of(now), versions.count_of(now)) == (epoch, a)
    assert now < 2**63


def test_a_task_has_one_living_holder() -> None:
    members = MemberState()
    chief = members.join("chief", 0, 11)
    with pytest.raises(Refused, match=r"^task chief:0 is held by process 11 and alive; process 12"):
        members.join("chief", 0, 12)
    assert [members.join("worker", -1, 13).name for _ in range(2)] == ["worker:0", "worker:1"]
    assert members.lose(chief.session) is chief
    assert members.lose(chief.session) is None
    assert members.join("chief", 0, 12).name == "chief:0"
    members.leave(2)
    assert members.join("worker", -1, 14).name == "worker:0"
    assert (members.count("worker"), members.left, members.lost) == (2, 1, [chief])


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), "3", True])
def test_a_timeout_is_seconds_or_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"^timeout must be "):
        checked_timeout(timeout)


def test_a_wait_without_end_has_no_timeout() -> None:
    assert checked_timeout(None) is None
    assert checked_timeout(float("inf")) is None
    assert checked_timeout(0) == 0.0


def test_a_manual_clock_goes_only_forward() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.0)
    assert clock.now() == 7.0
    with pytest.raises(ValueError, match=r"^a clock never goes back: advance\(-1\)$"):
        clock.advance(-1)


# The handshake and frames


def shaken(server_secret: bytes, client_secret: bytes) -> bytes:
    server = ServerSide(server_secret, b"s" * NONCE)
    client = ClientSide(client_secret, b"c" * NONCE)
    answer = client.answer(server.challenge())
    accepted, verdict = server.judge(answer)
    assert accepted == (server_secret == client_secret)
    assert len(verdict) == VERDICT
    client.check(verdict)
    return server.challenge() + answer + verdict


def test_both_ends_prove_the_secret_and_neither_sends_it() -> None:
    assert b"the secret itself" not in shaken(b"the secret itself", b"the secret itself")
    with pytest.raises(Refused, match=r"^the server refused this session: its secret is another"):
        shaken(b"one", b"other")


def test_a_server_that_cannot_prove_itself_is_not_believed() -> None:
    client = ClientSide(b"secret", b"c" * NONCE)
    client.answer(ServerSide(b"secret", b"s" * NONCE).challenge())
    with pytest.raises(Refused, match=r"^the server did not prove that it knows"):
        client.check(bytes(VERDICT))


def test_another_protocol_is_told_with_both_numbers() -> None:
    challenge = bytearray(ServerSide(b"", b"s" * NONCE).challenge())
    challenge[8] += 1
    with pytest.raises(
        ProtocolError,
        match=rf"^the server speaks protocol {codec.PROTOCOL + 1}, this process {codec.PROTOCOL}$",
    ):
        ClientSide(b"", b"c" * NONCE).answer(bytes(challenge))
    with pytest.raises(ProtocolError, match=r"^the client is not paceline: it sent b'GET / HTTP'$"):
        ServerSide(b"", b"s" * NONCE).judge(b"GET / HTTP/1.1\r\n\r\n")


def test_a_prefix_is_checked_against_its_bounds() -> None:
    good = codec.PREFIX.pack(codec.PROTOCOL, 0, 0, 5, 0, 0, 1, 2, 3)
    assert codec.parse_prefix(good).header == 5
    ours = codec.PROTOCOL
    for odd in [(9, 0, 0, 5, 0, 0), (ours, 7, 0, 5, 0, 0), (ours, 0, 1, 5, 0, 0)]:
        with pytest.raises(ProtocolError, match=rf"^not a frame of protocol {codec.PROTOCOL}: "):
            codec.parse_prefix(codec.PREFIX.pack(*odd, 1, 2, 3))
    large = codec.PREFIX.pack(ours, 0, 0, codec.MAX_HEADER + 1, 0, 0, 1, 2, 3)
    with pytest.raises(ProtocolError, match=r"^a frame of 67108865 \+ 0 \+ 0 bytes; at most"):
        codec.parse_prefix(large)


@given(st.binary(max_size=60))
def test_no_bytes_are_more_than_refused(data: bytes) -> None:
    for parse in (codec.parse_envelope, m.decode_request, m.decode_reply):
        try:
            parse(data)
        except ProtocolError as e:
            assert str(e).startswith(f"{len(data)} bytes are not a")  # noqa: PT017


def test_errors_come_back_as_what_they_were() -> None:
    back = m.revived(m.failure(UnknownName("no variable 'x'")))
    assert (type(back), str(back)) == (UnknownName, "no variable 'x'")
    back = m.revived(m.failure(ZeroDivisionError("oh")))
    assert (type(back), str(back)) == (PacelineError, "ZeroDivisionError: oh")
    assert type(m.revived(m.Failed("annotations", "x"))) is PacelineError


# Parking


class Lot:
    """A parking with a clock in the hand and a shelf that attempts take from."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.parking = Parking(self.clock)
        self.shelf = 0
        self.said: list[tuple[str, Any]] = []

    def park(self, name: str, need: int = 1, timeout: float | None = None) -> None:
        def attempt() -> Any:
            if self.shelf < need:
                return NOT_YET
            self.shelf -= need
            return need

        answer: Callable[[Any], None] = lambda result: self.said.append((name, result))  # noqa: E731
        parked = Parked(name, 1, lambda: f"wait of {name}", attempt, answer)
        self.parking.park("shelf", parked, timeout)


def test_waits_are_asked_again_in_the_order_they_came() -> None:
    lot = Lot()
    for name, need in (("a", 2), ("b", 1), ("c", 1)):
        lot.park(name, need)
    lot.shelf = 1
    lot.parking.changed("shelf")
    assert lot.said == [("b", 1)]
    lot.shelf = 3
    lot.parking.changed("shelf")
    assert lot.said == [("b", 1), ("a", 2), ("c", 1)]
    assert lot.parking.waiting("shelf") == 0


def test_in_order_none_passes_one_that_must_still_wait() -> None:
    lot = Lot()
    lot.park("a", 2)
    lot.park("b", 1)
    lot.shelf = 1
    lot.parking.changed("shelf", in_order=True)
    assert lot.said == []
    lot.shelf = 3
    lot.parking.changed("shelf", in_order=True)
    assert lot.said == [("a", 2), ("b", 1)]


def test_a_wait_ends_at_its_deadline_and_not_before() -> None:
    lot = Lot()
    lot.park("a", timeout=2.0)
    lot.park("b")
    assert lot.parking.next_deadline() == 2.0
    lot.clock.advance(1.9)
    lot.parking.expire()
    assert lot.said == []
    lot.clock.advance(0.1)
    lot.parking.expire()
    [(name, error)] = lot.said
    assert (name, type(error), str(error)) == ("a", TimedOut, "wait of a, after 2.0 s")
    assert lot.parking.next_deadline() is None
    lot.shelf = 5
    lot.parking.changed("shelf")
    assert lot.said[1:] == [("b", 1)]


def test_a_cancelled_wait_is_told_so_and_a_lost_peer_is_told_nothing() -> None:
    lot = Lot()
    lot.park("a")
    lot.park("b")
    lot.parking.lost("b")
    lot.parking.cancel("a", 2)
    assert lot.said == []
    lot.parking.cancel("a", 1)
    assert [(name, str(error)) for name, error in lot.said] == [("a", "wait of a: cancelled")]
    lot.shelf = 5
    lot.parking.changed("shelf")
    assert len(lot.said) == 1


def test_what_an_answer_changes_in_turn_is_looked_at_too() -> None:
    lot = Lot()
    said: list[str] = []

    def gives_more(result: Any) -> None:
        said.append("a")
        lot.shelf += 2
        lot.parking.changed("shelf")

    lot.parking.park("shelf", Parked("a", 1, str, lambda: lot.shelf or NOT_YET, gives_more), None)
    lot.park("b", 3)
    lot.shelf = 1
    lot.parking.changed("shelf")
    assert (said, lot.said) == (["a"], [("b", 3)])
