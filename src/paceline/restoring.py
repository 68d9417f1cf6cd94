"""The variables of a session's container, into checkpoints and back."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from paceline.checkpoints import Checkpoint, Saved
from paceline.core.errors import SchemaError, TimedOut
from paceline.core.names import key, label
from paceline.session import Session

_log = logging.getLogger("paceline")

PROBE = 0.5
"""Seconds within which what is whole can be read."""

Init: TypeAlias = Callable[[Session], object] | Mapping[str, Any]


class Restoring:
    """Brings back what is not there, or not all of it, and has `init` make the rest."""

    def __init__(self, session: Session, init: Init | None) -> None:
        self._session = session
        self._init = _checked(init)
        self.container = ""

    def saved(self) -> dict[str, Saved]:
        """Of every variable one version, each as it is when its turn comes."""
        found = {}
        spread = self._spread()
        with self._session.container(self.container):
            for name in self._variables():
                variable = self._session.variable(name, timeout=0.0)
                snapshot, bound = variable.read(), variable.memory()["bound"]
                found[name] = Saved(snapshot.version, snapshot.tree, bound, name in spread)
        return found

    def restore(self, found: Checkpoint | None, *, anew: bool = False) -> None:
        """Bring back what is missing; `anew`: all that was saved, whatever there is.

        Raises:
            SchemaError: what was saved differs from what is there; the message names the leaf.
            CheckpointError: the checkpoint is not what it was.
        """
        with self._session.container(self.container):
            self._restore(found, anew=anew)

    def _restore(self, found: Checkpoint | None, *, anew: bool) -> None:
        session = self._session
        saved = {} if found is None else found.manifest.variables
        missing = session.uninitialized(saved)
        torn = [name for name in saved if name not in missing] if anew else self._torn(saved)
        for name in torn:
            self._assign(found, name)
        homes = session.resources()["homes"]
        at_home = [n for n in missing if f"variable {label(key(n, self.container))}" in homes]
        for name in at_home:
            # Where it was it can be made at once: nobody sees what `init` would make first.
            self._make(found, name)
        if callable(self._init):
            self._init(session)
        elif self._init is not None:
            for name, value in self._init.items():
                if name not in missing:
                    session.variable(name, value)
        left = session.uninitialized(missing)
        for name in missing:
            if name in left:
                self._make(found, name)
            elif name not in at_home:
                # What `init` has just made has the structure, and maybe the place, that is wanted.
                self._assign(found, name)
        if found is not None and (missing or torn):
            _log.info("%s: restored %s from %s", session.task, [*missing, *torn], found.path)

    def _make(self, found: Checkpoint | None, name: str) -> None:
        assert found is not None
        saved = found.manifest.variables[name]
        if saved.spread:
            self._session.spread(name, found.read(name))
        else:
            self._session.variable(name, found.read(name), memory=saved.bound)

    def _assign(self, found: Checkpoint | None, name: str) -> None:
        assert found is not None
        try:
            self._session.variable(name).assign(found.read(name))
        except SchemaError as e:
            raise SchemaError(f"restore '{name}' from {found.path}: {e}") from e

    def _torn(self, saved: Iterable[str]) -> list[str]:
        """The spread variables of which a server that was started again has lost its part."""
        torn = []
        for name in self._spread().intersection(saved):
            try:
                self._session.variable(name).read(timeout=PROBE)
            except TimedOut:
                torn.append(name)
        return torn

    def _spread(self) -> set[str]:
        there = self._session.resources().get("spread", {})
        return {name for name in self._variables() if label(key(name, self.container)) in there}

    def _variables(self) -> list[str]:
        return [
            each["name"]
            for each in self._session.resources()["shared"]
            if each["kind"] == "variable" and each["container"] == self.container
        ]


def _checked(init: Init | None) -> Init | None:
    if init is None or isinstance(init, Mapping):
        return init
    try:
        inspect.signature(init).bind(None)
    except (TypeError, ValueError) as e:
        raise SchemaError(
            f"init: a dict of values by the names of their variables, or a function of the session,"
            f" not {init!r:.80}: {e}"
        ) from e
    return init
