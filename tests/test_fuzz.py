"""Requests of every type, from anybody, in any order: what comes of them is what may come of them.

A failure prints its seed: `crowd.run(Random(seed), STEPS)` does the same again.
"""

from __future__ import annotations

import math
from random import Random

import pytest
from crowd import Crowd, Inbox, run
from fuzz.frames import harmed, recorded, taken_apart
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import KINDS, Maker

from paceline.core import codec
from paceline.core import messages as m
from paceline.core.codec import REQUEST
from paceline.core.errors import ProtocolError
from paceline.core.tree import flatten
from paceline.server.lines import Peer
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame

STEPS = 150


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32))
def test_peers_that_ask_for_anything_harm_no_desk_and_leave_nothing(seed: int) -> None:
    run(Random(seed), STEPS)


@pytest.mark.parametrize("timeout", [-1.0, math.nan])
def test_a_request_that_cannot_wait_as_it_says_makes_nothing(timeout: float) -> None:
    crowd = Crowd(Random(0))
    peer = Peer(Inbox(shares_memory=False))
    crowd.service.feed(peer, Frame(REQUEST, 1, m.encode(m.Join("worker", 0, 1))))
    head = m.Head(flatten(1).layout, [1])
    define = m.Define("v", head, overwrite=True, timeout=timeout)
    with pytest.raises(ProtocolError, match=rf"^a timeout of {timeout} seconds$"):
        crowd.service.feed(peer, Frame(REQUEST, 2, m.encode(define)))
    assert not crowd.service.desk(VariableDesk).states


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_request_of_each_type_arrives_as_it_was_sent(kind: type) -> None:
    maker = Maker(Random(kind.__name__))
    for _ in range(20):
        sent, _ = maker.request(kind)
        data = m.encode(sent)
        found = m.decode_request(data)
        assert type(found) is kind
        assert m.encode(found) == data


def test_the_frames_of_the_corpus_are_of_the_messages_that_there_are() -> None:
    corpus = recorded()
    # Frames of messages that came later are made from their types.
    assert corpus.keys() <= {kind.__name__ for kind in KINDS}, "python -m fuzz.frames records anew"
    assert len(corpus) > 60
    for name, frames in corpus.items():
        for data in frames:
            found = taken_apart(data)
            request = m.decode_request(found.header)
            assert type(request).__name__ == name
            assert m.encode(request) == found.header


@settings(max_examples=300)
@given(st.integers(0, 1 << 32))
def test_whatever_bytes_are_read_they_are_a_message_or_a_protocol_error(seed: int) -> None:
    random = Random(seed)
    sent, _ = Maker(random).request()
    envelope = codec.Envelope([(0, 0, 8, 0)], [(1, 4096)], [1], [2])
    prefix = codec.PREFIX.pack(codec.PROTOCOL, 0, 0, 10, 10, 10, 1, 2, 3)
    readers = (
        (m.decode_request, m.encode(sent)),
        (m.decode_reply, m.encode(m.Value(1, b"", [1, "a", [None]]))),
        (codec.parse_envelope, codec.encode_envelope(envelope)),
        (lambda data: codec.parse_prefix(data[: codec.PREFIX.size].ljust(48)), prefix),
    )
    for read, data in readers:
        for broken in (harmed(data, random), random.randbytes(random.randrange(64))):
            try:
                found = read(broken)
            except ProtocolError:
                continue
            assert isinstance(found, m.Message | codec.Envelope | codec.Prefix)
