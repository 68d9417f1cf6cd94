"""What a peer may send by mistake or on purpose is refused, and goes no further."""

from __future__ import annotations

import contextlib
import enum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import codec, elements
from paceline.core import messages as m
from paceline.core import tree as trees
from paceline.core.arithmetic import add_values
from paceline.core.container_state import EPOCH_BITS, FUTURE, NUMBERS, ContainerState
from paceline.core.errors import ProtocolError, SchemaError
from paceline.server.frames import stored

DEEP = b"\x91" * 200_000

encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize(
    ("structure", "leaves", "said"),
    [
        (["l", [None], []], [], "it has a node of another form"),
        (["l", "l"], [], "it has a node of another form"),
        (["l", {"a": None}], [("int", None)], "it has a node of another form"),
        ([["l"], [None]], [("int", None)], r"it has a node \['l'\]"),
        (["x", [None]], [("int", None)], "it has a node 'x'"),
        ({"l": [None]}, [("int", None)], "it has a node of another form"),
        (7, [("int", None)], "it has a node of another form"),
        (["d", ["a"], [None, None]], [("int", None)] * 2, "it has a dict of 2 parts with the keys"),
        (["d", ["a", "a"], [None, None]], [("int", None)] * 2, "it has a dict of 2 parts"),
        (["d", ["a", "a"], [None]], [("int", None)], "it has a dict of 1 parts"),
        (["d", [[1]], [None]], [("int", None)], "it has a dict of 1 parts"),
        (["d", [True], [None]], [("int", None)], "it has a dict of 1 parts"),
        (["d", [1.5], [None]], [("int", None)], "it has a dict of 1 parts"),
        (["l", [None]], [], "its structure and its leaves do not agree"),
        (None, [("set", None)], "unknown kind 'set'"),
        (None, [("O", ())], "unknown kind 'O'"),
        (None, [("|O", ())], r"unknown kind '\|O'"),
        (None, [("f4", ())], "unknown kind 'f4'"),
        (None, [("<f4,(", ())], r"unknown kind '<f4,\('"),
        (None, [("(2,3)f4", ())], "unknown kind"),
        (None, [("|V8", ())], r"unknown kind '\|V8'"),
        (None, [("<U0", (1 << 33,))], "unknown kind '<U0'"),
        (None, [("|S0", (0,))], r"unknown kind '\|S0'"),
        (None, [("<M8[no]", ())], "Invalid datetime unit"),
        (None, [(None, ())], "expected string"),
        (None, [("<f8", (-1,))], r"a leaf of <f8\[-1\]"),
        (None, [("<f8", (1.5,))], r"a leaf of <f8\[1.5\]"),
        (None, [("<f8", (True,))], r"a leaf of <f8\[True\]"),
        (None, [("<f8", (1,) * 65)], r"a leaf of <f8\[1, 1"),
        (None, [("<f8", (0, 1 << 62))], r"a leaf of <f8\[0, 4611686018427387904\] is too big"),
    ],
)
def test_a_layout_that_lies_is_refused_before_anyone_builds_from_it(
    structure: Any, leaves: Any, said: str
) -> None:
    with pytest.raises(SchemaError, match=rf"^\d+ bytes are not a layout: {said}"):
        trees.decoded(encode((structure, leaves)))


def test_an_array_of_texts_of_no_length_does_not_leave() -> None:
    texts: Any = np.ndarray((2,), "<U0", b"")
    with pytest.raises(SchemaError, match=r"^leaf \$ is an array of <U0; allowed are "):
        trees.flatten(texts)
    empty = trees.flatten(np.array([""]))
    assert trees.unflatten(empty.layout, [], np.zeros(64, np.uint8)) == [""]


def test_a_layout_nested_without_end_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^200000 bytes are not a layout: "):
        trees.decoded(DEEP)
    nested: Any = None
    for _ in range(trees.MAX_DEPTH + 2):
        nested = ["l", [nested]]
    with pytest.raises(SchemaError, match=r"are not a layout: it is nested over 64 deep$"):
        trees.decoded(encode((nested, [("int", None)])))


def test_the_deepest_tree_that_may_travel_arrives_and_one_deeper_does_not_leave() -> None:
    tree: Any = 1
    for _ in range(trees.MAX_DEPTH + 1):
        tree = [tree]
    flat = trees.flatten(tree)
    assert trees.unflatten(flat.layout, flat.values, None) == tree
    with pytest.raises(SchemaError, match=r"^\$\[0\]\[0\]\[0\]\.\.\. is nested over 64 deep"):
        trees.flatten([tree])


def test_a_tree_may_have_as_many_leaves_as_allowed_and_not_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = trees.flatten([1] * 5).layout
    monkeypatch.setattr(trees, "MAX_LEAVES", 4)
    trees.decoded.cache_clear()
    assert trees.unflatten(trees.flatten([1] * 4).layout, [1] * 4, None) == [1] * 4
    with pytest.raises(SchemaError, match=r"^a tree has at most 4 leaves, this one 5$"):
        trees.flatten([1] * 5)
    with pytest.raises(SchemaError, match=r"layout: it has 5 leaves, at most 4 are allowed$"):
        trees.decoded(more)


PARTS: Any = st.recursive(
    st.none() | st.sampled_from(["d", "l", "t", "a"]) | st.integers(-2, 2),
    lambda part: st.lists(part, max_size=3),
    max_leaves=10,
)
LEAVES = st.lists(
    st.tuples(
        st.sampled_from(["int", "<f8", "|O", "bfloat16", "<U0", "f4", "?", "<M8[s]", ","]),
        st.none() | st.lists(st.integers(-1, 1 << 62), max_size=3),
    ),
    max_size=3,
)


@given(PARTS, LEAVES)
def test_whatever_passes_for_a_layout_can_be_walked_named_and_built(
    structure: Any, leaves: Any
) -> None:
    data = encode((structure, leaves))
    with contextlib.suppress(SchemaError):
        plan = trees.decoded(data)
        assert len(trees.paths(data)) == len(plan.leaves)
        assert len({*trees.paths(data)}) == len(plan.leaves)
        assert all(map(str, plan.leaves))
        if plan.nbytes < 1 << 16:
            block = np.zeros(plan.nbytes, np.uint8)
            plain = [0] * (len(plan.leaves) - len(plan.places))
            trees.unflatten(data, plain, block)


@pytest.mark.parametrize("values", [[], [1, 2]])
def test_a_tree_with_more_or_fewer_values_than_it_declares_is_refused(values: list[Any]) -> None:
    layout = trees.flatten([1, np.zeros(2)]).layout
    said = rf"^a tree of 1 plain values came with {len(values)}$"
    with pytest.raises(SchemaError, match=said):
        trees.unflatten(layout, values, np.zeros(64, np.uint8))


@pytest.mark.parametrize(
    "values",
    [[1], [1, "a", 0], [1, b"a"], [1.0, "a"], [True, "a"], [[1], "a"], [1 << 63, "a"], [None, "a"]],
)
def test_plain_values_are_of_the_kinds_that_the_layout_says(values: list[Any]) -> None:
    layout = trees.flatten([1, "a"]).layout
    with pytest.raises(ProtocolError, match=r"^a tree of 2 plain values came with others: \["):
        stored(m.Head(layout, values), None)
    assert stored(m.Head(layout, [trees.MAX_INT, ""]), None).values == [trees.MAX_INT, ""]


def test_envelopes_and_messages_nested_without_end_are_refused() -> None:
    envelope = b"\x95" + b"\x90" * 4 + DEEP + b"\xc0"
    with pytest.raises(ProtocolError, match=r"^200006 bytes are not an envelope: "):
        codec.parse_envelope(envelope)
    with pytest.raises(ProtocolError, match=r"^200002 bytes are not a request: "):
        m.decode_request(b"\x92\x03" + DEEP)
    with pytest.raises(ProtocolError, match=r"^200002 bytes are not a reply: "):
        m.decode_reply(b"\x92\x6a" + DEEP)


def many(count: int, one: bytes) -> bytes:
    """A list of that many, as bytes."""
    return b"\xdd" + count.to_bytes(4, "big") + one * count


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        (many(elements.LISTS - 3, b"\x94\xc0\xc0\xc0\xc0"), True),
        (many(elements.LISTS - 2, b"\x94\xc0\xc0\xc0\xc0"), False),
        (many(elements.LISTS + 1, b"\x81\xa1a\xc0\xa1"[:4]), False),
        (many(64, many(elements.LISTS // 8, b"\x90")), False),
        (many(elements.MOST - 16, b"\xc0"), True),
        (many(elements.MOST + 1, b"\xc0"), False),
        (many(5 << 20, b"\xc0"), False),
        (many(1, b"\xc6\x00\x80\x00\x00" + bytes(1 << 23)), True),
    ],
    ids=["lists", "a list more", "maps", "nested", "values", "values more", "many", "one text"],
)
def test_a_request_of_more_values_than_allowed_is_refused_before_they_are_made(
    values: bytes, allowed: bool
) -> None:
    head = b"\x94\x0c\xa1v\x92\xc4\x00" + values + b"\xc0"
    assert len(head) > elements.LARGE
    if allowed:
        assert type(m.decode_request(head)) is m.Assign
    else:
        with pytest.raises(SchemaError, match=r"^more than 2097152 plain values in one step, or"):
            m.decode_request(head)
    with pytest.raises(ProtocolError, match=r"^\d+ bytes are not a request: "):
        m.decode_request(head[:-2])


def test_a_layout_of_more_nodes_than_allowed_is_refused_before_they_are_made() -> None:
    layout = b"\x92\x92\xa1l" + many(4 * trees.MAX_LEAVES + 1, b"\x90") + b"\x90"
    with pytest.raises(SchemaError, match=r"are not a layout: more than \d+ plain values"):
        trees.decoded(layout)


@pytest.mark.parametrize(("want", "abandoned"), [(-1, 0), (0, -1)])
def test_a_ledger_is_not_turned_around_by_a_minus(want: int, abandoned: int) -> None:
    good = m.Offer("c", [], 0, 0, None)
    assert m.decode_request(m.encode(good)) == good
    with pytest.raises(ProtocolError, match=r"bytes are not a request: Expected `int` >= 0"):
        m.decode_request(m.encode(m.Offer("c", [], want, abandoned, None)))


@pytest.mark.parametrize(("least", "most"), [(-1, 1), (0, -1), (-1, -1)])
def test_nobody_takes_a_negative_number_of_items(least: int, most: int) -> None:
    good = m.Dequeue("q", 0, 1, 0.0)
    assert m.decode_request(m.encode(good)) == good
    with pytest.raises(ProtocolError, match=r"bytes are not a request: Expected `int` >= 0"):
        m.decode_request(m.encode(m.Dequeue("q", least, most, 0.0)))


@pytest.mark.parametrize("epoch", [1, 1 << 31, 1 << 62])
def test_a_reset_of_a_number_that_none_can_have_is_refused_and_holds_up_no_other(
    epoch: int,
) -> None:
    most = min(NUMBERS, (epoch + FUTURE) << EPOCH_BITS)
    for number in (0, -1, most, NUMBERS, (1 << 64) - 1):
        state = ContainerState(epoch)
        said = rf"^no reset has the number {number}; they are 1 to {most - 1}$"
        with pytest.raises(SchemaError, match=said):
            state.reset(["c"], "", number)
        assert state.generation("c") == 0
    assert state.reset(["c"], "", most - 1) == most - 1
    if most < NUMBERS:
        assert state.reset(["c"], "") == most
        other = ContainerState(epoch)
        for container in ["d", "d", "e"]:
            number = state.reset([container], "")
            assert other.reset([container], "", number) == number
        assert number == 4 + ((epoch + FUTURE // 2) << EPOCH_BITS)


def test_what_is_no_frame_is_shown_from_where_it_begins() -> None:
    data = b"good" * 3 + b"GET / HTTP/1.1" + bytes(codec.PREFIX.size)
    with pytest.raises(ProtocolError, match=rf"^not a frame of protocol 2: {b'GET / HT'.hex()}$"):
        codec.parse_prefix(data, 12)


@pytest.mark.parametrize("part", ["header", "envelope", "inline"])
def test_a_frame_may_be_as_large_as_allowed_and_not_one_byte_more(part: str) -> None:
    sizes = {"header": codec.MAX_HEADER, "envelope": codec.MAX_ENVELOPE, "inline": codec.MAX_INLINE}
    most = sizes[part]
    lengths = [most if name == part else 0 for name in sizes]
    if most < 1 << 32:
        over = [most + 1 if name == part else 0 for name in sizes]
    else:
        over = [0, 0, most + 1]
    prefix = codec.parse_prefix(codec.PREFIX.pack(codec.PROTOCOL, 0, 0, *lengths, 1, 2, 3))
    assert getattr(prefix, part) == most
    with pytest.raises(ProtocolError, match=r"^a frame of \d+ \+ \d+ \+ \d+ bytes; at most"):
        codec.parse_prefix(codec.PREFIX.pack(codec.PROTOCOL, 0, 0, *over, 1, 2, 3))


def test_arrays_of_another_byte_order_are_told_apart_in_the_message() -> None:
    found, declared = (trees.flatten(np.zeros(3, order + "f4")).layout for order in "><")
    with pytest.raises(SchemaError, match=r"^x: leaf \$ is >f4\[3\], declared float32\[3\]$"):
        trees.check(found, declared, "x")


class Colour(str, enum.Enum):  # noqa: UP042
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


def test_relatives_of_plain_types_travel_as_their_values() -> None:
    flat = trees.flatten([Colour.RED, Level.HIGH])
    assert flat.values == ("red", 3)
    assert [type(value) for value in flat.values] == [str, int]


def sums(value: Any, delta: Any) -> list[Any]:
    a, b = trees.flatten({"n": value}), trees.flatten({"n": delta})
    return add_values(a.layout, a.values, b.layout, b.values)


def test_a_sum_of_ints_fits_into_64_bits_or_is_refused() -> None:
    assert sums(2**63 - 2, 1) == [2**63 - 1]
    assert sums(-(2**63) + 1, -1) == [-(2**63)]
    for value, delta in ((2**63 - 1, 1), (-(2**63), -1)):
        said = r"^assign_add: leaf \$\.n would be an int of more than 64 bits$"
        with pytest.raises(SchemaError, match=said):
            sums(value, delta)


def test_sums_leave_alone_what_is_no_number_and_nothing_is_added_to() -> None:
    assert sums(True, False) == [True]
    assert sums("a", "") == ["a"]
    with pytest.raises(SchemaError, match=r"^assign_add: leaf \$\S* is str, which cannot be added"):
        sums("a", "b")
    assert sums(0.5, 0.25) == [0.75]
