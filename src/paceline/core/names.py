"""Names that users give to what they share."""

from __future__ import annotations

from typing import Any

from paceline.core.errors import SchemaError


def text(name: Any, what: str) -> str:
    """`name` as a plain str, if it can travel as one.

    Raises:
        SchemaError: it is no str, or none that UTF-8 can hold; the message begins with `what`.
    """
    if not isinstance(name, str):
        raise SchemaError(f"{what} is a str, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise SchemaError(f"{what} is a str that UTF-8 can hold, not {name[:40]!r}") from e
    return str(name)
