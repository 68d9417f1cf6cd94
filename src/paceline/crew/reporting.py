"""Writes post-mortems of workers, beside whatever else goes on."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline._version import __version__
from paceline.calling import told
from paceline.core import tree as trees
from paceline.core.black_box import Seen
from paceline.core.errors import FunctionError, PacelineError
from paceline.core.names import parts, quoted
from paceline.core.tree import Tree
from paceline.crew.calls import packed
from paceline.post_mortems import Facts, Folder
from paceline.session import Session
from paceline.worker.caller import last_read
from paceline.worker.line import Held
from paceline.worker.own import Own

_log = logging.getLogger("paceline")

BACKLOG = 8
"""Post-mortems that may wait to be written; what fails beyond has none."""

CLOSING = 10.0
"""Seconds that those which wait are waited for when the cluster ends."""

REPLAY = "run it alone again, in a debugger: paceline replay"

FETCHING = 5.0
"""Seconds within which a variable for a post-mortem is to be had, or is not in it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What the crew knows of a worker that failed.

    `variables` are the keys of those that were among the resources, `item` is `None` for a call.
    """

    worker: str
    seed: int
    how: str
    seen: Seen
    output: Sequence[str]
    environment: dict[str, str]
    name: str
    function: bytes
    input: bytes | None
    shown: str | None
    item: int | None
    variables: Sequence[str]
    held: Sequence[Held] = ()


class Reporting:
    """Puts failures into a folder, in a thread of its own that ends when there is no more to write.

    `beside=False` writes at once, where everything is in one thread. `fetch` is told once there is
    a session to read variables with: it has the newest version of one, by its key.
    """

    def __init__(self, folder: Folder | None, *, beside: bool) -> None:
        self.fetch: Callable[[str], tuple[int, Tree]] | None = None
        self._folder = folder
        self._beside = beside
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Path, Failure]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def keeps(self) -> int:
        """Bytes of variables that a post-mortem may have; 0 where none are written."""
        return 0 if self._folder is None else self._folder.limit

    def report(self, failure: Failure) -> str:
        """Have a post-mortem written; a line that says what to do with it, or nothing."""
        if self._folder is None:
            return ""
        path = self._folder.place(failure.worker)
        if not self._beside:
            if not self._write(path, failure):
                return ""
        else:
            with self._lock:
                if len(self._waiting) >= BACKLOG:
                    return ""
                self._waiting.append((path, failure))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="paceline-post-mortem", daemon=True
                    )
                    self._thread.start()
        return f"\n{REPLAY} {shlex.quote(str(path))}"

    def close(self) -> None:
        """Wait until what was to be written is there, for `CLOSING` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSING)
        # It holds the session: a ring outlives its end until somebody looks for rings.
        self.fetch = None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                path, failure = self._waiting.popleft()
            self._write(path, failure)

    def _write(self, path: Path, failure: Failure) -> bool:
        assert self._folder is not None
        try:
            saved, absent = self._variables(failure)
            facts = Facts(
                paceline=__version__,
                at=time.time(),
                worker=failure.worker,
                seed=failure.seed,
                how=failure.how,
                function=failure.name,
                item=failure.item,
                shapes=failure.seen.shapes,
                input=failure.shown,
                versions=dict(failure.seen.versions),
                saved={key: version for key, (version, _) in saved.items()},
                absent=absent,
                output=list(failure.output),
                environment=failure.environment,
                path=sys.path,
                argv=sys.argv,
            )
            here = {key: tree for key, (_, tree) in saved.items()}
            self._folder.write(path, facts, failure.function, failure.input, here)
        except Exception as e:
            # The failure itself was told already, and is what matters.
            _log.warning(
                "the post-mortem of %s, %s, cannot be written: %s", failure.worker, path, e
            )
            return False
        return True

    def _variables(self, failure: Failure) -> tuple[dict[str, tuple[int, Tree]], dict[str, str]]:
        """The variables that the worker had, as far as they are to be had; and why others not."""
        saved: dict[str, tuple[int, Tree]] = {}
        absent: dict[str, str] = {}
        room = self.keeps
        for each in failure.held:
            saved[each.key] = each.version, trees.unflatten(each.layout, each.values, each.content)
            room -= each.content.nbytes
        for key in dict.fromkeys([*failure.seen.versions, *failure.variables]):
            if key in saved:
                continue
            fetch = self.fetch
            if fetch is None:
                absent[key] = "there was no session"
                continue
            try:
                version, tree = fetch(key)
            except PacelineError as e:
                absent[key] = str(e)
                continue
            nbytes = trees.flatten(tree).nbytes
            if nbytes > room:
                absent[key] = (
                    f"{quoted(key)} has {nbytes} bytes, more than the {self.keeps} of a file in"
                    f" {self._folder.path if self._folder else ''}; Cluster(post_mortem=) names"
                    " another folder"
                )
                continue
            room -= nbytes
            saved[key] = version, tree
        return saved, absent


def newest(session: Session, key: str) -> tuple[int, Tree]:
    """The newest version of a variable, by its key."""
    known = parts(key)
    with session.lines.inside(known.container, known.generation):
        variable: Any = session.variable(known.name, timeout=FETCHING)
    found = variable.read(timeout=FETCHING)
    return found.version, found.tree


def leaving(
    folder: Folder | None,
    do: Callable[..., None],
    fn: Callable[..., Any],
    resources: tuple[Any, ...],
    *,
    items: bool,
) -> Callable[[Own], None]:
    """`do`, which runs a function in this very process, and puts it into a file if it fails.

    The error's notes say which. Nothing travels here: the function is written as it then is, with
    what it has captured.
    """

    def done(worker: Own) -> None:
        try:
            do(worker, fn=fn, resources=resources)
        except Exception as e:
            # Where the server is gone, that is why.
            if folder is not None and worker.session.lines.alive():
                line = _left(folder, worker, fn, resources, told(e), items=items)
                if line:
                    e.add_note(line)
            raise

    return done


def _left(
    folder: Folder,
    worker: Own,
    fn: Callable[..., Any],
    resources: tuple[Any, ...],
    how: str,
    *,
    items: bool,
) -> str:
    name, seen = worker.session.task, worker.seen()
    try:
        function = packed(fn, resources)
    except FunctionError as e:
        _log.warning("%s leaves no post-mortem: %s", name, str(e))
        return ""
    reporting = Reporting(folder, beside=False)
    reporting.fetch = partial(newest, worker.session)
    failure = Failure(
        name,
        worker.seed,
        how,
        seen,
        (),
        {},
        function.name,
        function.payload,
        None,
        None,
        seen.items if items else None,
        function.variables,
        last_read(resources, reporting.keeps),
    )
    return reporting.report(failure).strip()
