"""Names that users give to what they share, and the keys that names have on the wire.

A key is the name, its container, and the container's generation: the number of its last reset. In
the default container, before its first reset, the key is the name. Here they are joined, taken
apart, and put into words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paceline.core.errors import SchemaError

MAX_NAME = 256

BETWEEN = "\0"
"""Between the parts of a key; no name and no container has it."""

_REST = re.compile(rf"{BETWEEN}([^{BETWEEN}]*){BETWEEN}\d+")


class Parts(NamedTuple):
    """What a key says."""

    name: str
    container: str = ""
    generation: int = 0


def text(name: Any, what: str) -> str:
    """`name` as a plain str, if it can travel as one.

    Raises:
        SchemaError: it is no str, or none that UTF-8 can hold, or has a NUL; the message begins
            with `what`.
    """
    if not isinstance(name, str):
        raise SchemaError(f"{what} is a str, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise SchemaError(f"{what} is a str that UTF-8 can hold, not {name[:40]!r}") from e
    if BETWEEN in name:
        raise SchemaError(f"{what} is a str without NUL, not {name[:40]!r}")
    return str(name)


def words(said: Any, what: str) -> str:
    """A message of a user's, with `?` for what UTF-8 cannot hold, as in the name of a file.

    Raises:
        SchemaError: it is no str; the message begins with `what`.
    """
    if not isinstance(said, str):
        raise SchemaError(f"{what} is a str, not {said!r}")
    return said.encode(errors="replace").decode()


def key(name: str, container: str = "", generation: int = 0) -> str:
    """A name as it travels."""
    if not container and not generation:
        return name
    return f"{name}{BETWEEN}{container}{BETWEEN}{generation}"


def parts(key: str) -> Parts:
    """What a key was made of.

    Raises:
        SchemaError: it is none.
    """
    found = key.split(BETWEEN)
    if len(found) == 1:
        return Parts(key)
    if len(found) != 3 or not re.fullmatch(r"\d{1,18}", found[2], re.ASCII):
        raise SchemaError(f"no name, and no key of one: {key[:40]!r}")
    return Parts(found[0], found[1], int(found[2]))


def checked(key: str) -> str:
    """`key`, if its parts can be a name and a container.

    Raises:
        SchemaError: it is no key, the name is empty, or a part is too long.
    """
    name, container, _ = parts(key)
    if not 0 < len(name) <= MAX_NAME:
        raise SchemaError(f"a name has 1 to {MAX_NAME} characters, not {len(name)}: {name[:40]!r}")
    checked_container(container)
    return key


def checked_container(container: str) -> str:
    """`container`, if it can be the name of one; that of the default one is empty.

    Raises:
        SchemaError: it is too long, or has a NUL.
    """
    container = text(container, "the name of a container")
    if len(container) > MAX_NAME:
        raise SchemaError(
            f"the name of a container has at most {MAX_NAME} characters, not {len(container)}:"
            f" {container[:40]!r}"
        )
    return container


def containers(named: str | Iterable[str] | None) -> list[str] | None:
    """One container or several, as somebody names them; `None` for all.

    Raises:
        SchemaError: one of them is no container's name.
    """
    if named is None:
        return None
    if not isinstance(named, Iterable):
        raise SchemaError(f"containers: names of some, or None for all, not {named!r:.80}")
    return [checked_container(each) for each in ([named] if isinstance(named, str) else named)]


def label(key: str) -> str:
    """A key in a listing: the name, and which container it is in, unless that is the default."""
    name, container, _ = parts(key)
    return f"{name} in container '{container}'" if container else name


def quoted(key: str) -> str:
    """A key in a message."""
    name, container, _ = parts(key)
    return f"'{name}' in container '{container}'" if container else f"'{name}'"


def shown(text: str) -> str:
    """A message that has keys in quotes, in words."""
    if BETWEEN not in text:
        return text
    return _REST.sub(lambda rest: f"' in container '{rest[1]}" if rest[1] else "", text)


def those(names: Sequence[object]) -> str:
    """Names, or "nobody", and the verb that goes with so many."""
    return f"{', '.join(map(str, names)) or 'nobody'} {'are' if len(names) > 1 else 'is'}"


def beside(key: str, keys: Any) -> list[str]:
    """The names among `keys` that are in the container of `key`, in order."""
    container = parts(key).container
    found = map(parts, keys)
    return sorted(each.name for each in found if each.container == container)
