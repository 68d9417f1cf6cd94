"""Calling users' functions: what they are given, and how their errors are told."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent)


def keywords(fn: Callable[..., Any], worker: object) -> dict[str, Any]:
    """`worker=worker`, if `fn` has a parameter of that name."""
    return {"worker": worker} if "worker" in (parameters(fn) or ()) else {}


def parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function by name; `None` where nobody can tell."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return None


def told(error: BaseException) -> str:
    """The traceback of a function's error, from the function's own first line on."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    # Without a line of the function's own, ours are all there is.
    shown = error.with_traceback(first or error.__traceback__)
    return "".join(traceback.format_exception(shown)).rstrip()
