"""What a session has in its hands of something shared."""

from __future__ import annotations

from typing import ClassVar

from paceline.connection import Connection
from paceline.core.names import parts, quoted


class Handle:
    """Something shared: its name, its container, and the line to its home.

    Attributes:
        key: how the name travels. After a reset of the container it is a key no more, and a name
            made anew has another.
        called: name and container, as messages say it.
    """

    kind: ClassVar[str]

    def __init__(self, connection: Connection, key: str) -> None:
        self.key = key
        self.name, self.container, _ = parts(key)
        self.called = quoted(key)
        self._connection = connection

    def __paceline_handle__(self) -> tuple[str, ...]:
        return (self.kind, self.key, self._connection.address)
