"""How many values bytes say, known before these are made: an empty list is a byte, and then 72."""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.core.errors import SchemaError

LARGE = 1 << 20
"""Bytes up to which nobody counts."""

MOST = 1 << 21
"""Values that a larger one may have: numbers, texts and bytes."""

LISTS = 1 << 18
"""Lists and maps that they may be in."""

_LISTS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])

_AtMost = msgspec.Meta(max_length=1 << 22)
_list = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _AtMost])
_map = msgspec.msgpack.Decoder(Annotated[dict[str | int, msgspec.Raw], _AtMost])


def check_elements(data: bytes, most: int = MOST, lists: int = LISTS) -> None:
    """Check that a header, or a layout, has no more values than allowed; nothing is made of them.

    Raises:
        SchemaError: it has more.
        MsgspecError: the bytes are neither.
    """
    if len(data) <= LARGE:
        return
    count = opened = 0
    inner = _LISTS | _MAPS
    left: list[bytes | msgspec.Raw] = [data] if data[0] in inner else []
    try:
        while left:
            part = left.pop()
            if memoryview(part)[0] in _LISTS:
                found = _list.decode(part)
            else:
                found = list(_map.decode(part).values())
            left += [each for each in found if memoryview(each)[0] in inner]
            count, opened = count + len(found), opened + 1
            if count > most or opened + len(left) > lists:
                raise _too_many(most, lists)
    except msgspec.ValidationError as e:
        raise _too_many(most, lists) from e


def _too_many(most: int, lists: int) -> SchemaError:
    return SchemaError(
        f"more than {most} plain values in one step, or {lists} lists of them: send fewer at a"
        " time, or as arrays, which may have any size"
    )
