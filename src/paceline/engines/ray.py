"""Tasks as actors of a Ray cluster: where they are, and what they may use, is Ray's."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
)

from paceline.core.errors import Closed, FunctionError, TimedOut, WorkerFailed
from paceline.engines._actor import GROUPS, PROTOCOL, Actor, host, versions
from paceline.engines._loop import Loop
from paceline.engines._room import Room, became, connected
from paceline.engines.base import Engine, Exit, Listener, Task, TaskSpec, hygiene
from paceline.engines.wishes import Ray

KILL_SECONDS = 10.0
"""How long Ray may need to say of an actor that it has ended."""

LOOK_SECONDS = 2.0
"""How long an actor may need to say what it is at."""


@dataclass(eq=False)
class _Body:
    """An actor, and what it was made with.

    When its process or its node dies, Ray starts it again, where there is room: it then is the next
    task of its name.
    """

    actor: Any
    spec: TaskSpec
    node: str = ""
    address: str = ""

    def call(self, method: str, group: str, *args: object, retries: int = 0) -> Any:
        """The reference of what a method of the actor returns."""
        options = {"concurrency_group": group, "max_task_retries": retries}
        return getattr(self.actor, method).options(**options).remote(*args)

    def kill(self, *, again: bool = False) -> None:
        """End its process; whether Ray is to start it again."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor, no_restart=not again)


class RayTask(Task):
    """A life of an actor. Methods with an underscore are for the loop's thread."""

    def __init__(self, spec: TaskSpec, listener: Listener, engine: RayEngine, body: _Body) -> None:
        super().__init__(spec.name)
        self.spec = spec
        self.body = body
        self._listener = listener
        self._engine = engine
        self._loop = engine.loop
        self._target = b""
        self._outbox: list[bytes] = []
        self._hanging_up = self._giving = self._killed = False
        self._pid: int | None = None
        self._begun = False
        self._told = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._pid

    def __repr__(self) -> str:
        where = f"on {self.body.address}" if self._begun else "not placed yet"
        return f"<RayTask {self._name!r}, {where}, {self._exit or 'alive'}>"

    def _deliver(self, message: object) -> None:
        body = pickle.dumps(message, PROTOCOL)
        self._loop.post(functools.partial(self._queue, body))

    def stacks(self) -> str | None:
        if not self._begun:
            return None
        try:
            found: str = ray.get(self.body.call("look", "look"), timeout=LOOK_SECONDS)
        except (RayError, GetTimeoutError):
            return None
        return found or None

    def kill(self) -> None:
        self._loop.post(self._kill)

    def hang_up(self) -> None:
        """Close the line to the task once all that was sent has left."""
        self._stopping = True
        self._loop.post(self._hang_up)

    def wait(self, timeout: float) -> bool:
        """Wait until the listener was told of the end; false when it was not."""
        return self._told.wait(timeout)

    def lose(self) -> None:
        """Tell of its end, of which Ray says nothing."""
        self._loop.post(lambda: self._finish(Exit(cause="Ray does not say what became of it")))

    def _ask(
        self, then: Callable[[Any], None], method: str, group: str, *args: object, retries: int = 0
    ) -> None:
        """Call the actor; what comes of it is heard on the loop's thread."""
        try:
            reference = self.body.call(method, group, *args, retries=retries)
        except (RayError, ValueError) as e:
            self._lost(e)
            return

        def came(future: Future[Any]) -> None:
            # With it goes the reference, without which nothing would come.
            self._loop.post(lambda: self._heard(then, future, reference))

        reference.future().add_done_callback(came)

    def _heard(self, then: Callable[[Any], None], future: Future[Any], reference: Any) -> None:
        if self._exit is not None:
            return
        error = future.exception()
        if error is None:
            then(future.result())
        else:
            self._lost(error)

    def _start(self, target: bytes) -> None:
        self._target = target
        # Where Ray has no room for it yet, this is when it has.
        self._ask(self._breathed, "breathe", "look", retries=-1)

    def _breathed(self, found: dict[str, Any]) -> None:
        self._note_move(found)
        self.body.node, self.body.address = found["node"], found["address"]
        if found["versions"] != versions():
            there, here = (_listed(each) for each in (found["versions"], versions()))
            where = f"the node {found['address']} ({found['node'][:8]})"
            self._end(
                Exit(
                    cause=f"{where} has {there}, this program has {here}: they have to be the same",
                    hopeless=True,
                )
            )
            return
        if found["used"]:
            # It was only out of reach, and its launcher has given it up.
            self.body.kill(again=True)
            self._ask(self._breathed, "breathe", "look", retries=-1)
            return
        self._begun = True
        if found["host"] == host():
            self._pid = found["pid"]
        self.host, self.node = found["network"], found["node"]
        self._loop.tell(self._engine.placed, self)
        self._ask(lambda _: None, "work", "work", self._target, sys.path)
        self._ask(self._took, "take", "take")
        self._flush()

    def _note_move(self, found: dict[str, Any]) -> None:
        before = self.body.node
        if before and before != found["node"]:
            self._engine.moved(self._name, self.body.address, before, found)

    def _took(self, sent: tuple[list[bytes], Exit | None]) -> None:
        bodies, end = sent
        for body in bodies:
            self._loop.tell(self._listener.received, self, pickle.loads(body))
        if end is None:
            self._ask(self._took, "take", "take")
        else:
            self._end(end)

    def _queue(self, body: bytes) -> None:
        self._outbox.append(body)
        self._flush()

    def _hang_up(self) -> None:
        self._hanging_up = True
        self._flush()

    def _flush(self) -> None:
        """Have one call on its way at a time: so they arrive in order."""
        if not self._begun or self._giving or self._exit is not None:
            return
        if self._outbox or self._hanging_up:
            self._giving = True
            bodies, self._outbox = self._outbox, []
            hang_up, self._hanging_up = self._hanging_up, False
            self._ask(self._gave, "give", "give", bodies, hang_up)

    def _gave(self, _: None) -> None:
        self._giving = False
        self._flush()

    def _kill(self) -> None:
        if self._exit is None:
            self._killed = True
            self.body.kill()

    def _lost(self, error: BaseException) -> None:
        if self._killed:
            self._finish(Exit(signal="SIGKILL"))
        elif isinstance(error, ActorUnavailableError) or (
            isinstance(error, ActorDiedError) and self._begun
        ):
            # Ray starts it again, if it may.
            self._finish(Exit(cause=became(error)), keeps=not self.spec.stays)
        else:
            hopeless = not isinstance(error, ActorDiedError)
            self._end(Exit(cause=became(error), hopeless=hopeless))

    def _end(self, how: Exit) -> None:
        """It has ended by itself; its process is of no more use."""
        self.body.kill()
        self._finish(how)

    def _finish(self, how: Exit, *, keeps: bool = False) -> None:
        if self._exit is not None:
            return
        self._engine.ended(self, keeps=keeps)
        self._exit = how
        self._loop.tell(self._listener.ended, self, how)
        self._told.set()


class RayEngine(Engine):
    """Starts each task as an actor of a Ray cluster, which it joins if the program has not.

    Raises:
        Disconnected: there is no cluster at that address.
        Unsupported: it has another version of Ray or Python.
    """

    near = False

    def __init__(self, asked: Ray | None = None) -> None:
        self._asked = asked or Ray()
        self._ours = connected(self._asked)
        self._room = Room(self._asked)
        self._class = ray.remote(concurrency_groups=GROUPS)(Actor)
        self._tasks: set[RayTask] = set()
        self._bodies: dict[str, _Body] = {}
        self._places: dict[str, str] = {}
        self._closing = False
        self.loop = Loop("paceline-ray", lambda: None, self._end_all)

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._tasks)} tasks"
        return f"<RayEngine, {state}>"

    def reserve(self, tasks: Sequence[str]) -> None:
        self._room.reserve(tasks)

    def start(self, spec: TaskSpec, listener: Listener) -> RayTask:
        self.loop.raise_kept()
        try:
            target = cloudpickle.dumps(spec.target, PROTOCOL)
        except Exception as error:
            raise FunctionError(f"the target of {spec.name!r} cannot be sent: {error}") from error
        what = f"start {spec.name!r}"
        return self.loop.call(what, lambda: self._start(what, spec, listener, target))

    def forget(self, name: str) -> None:
        self.loop.post(lambda: self._forget(name))

    def stop(self, task: Task, timeout: float) -> None:
        assert isinstance(task, RayTask)
        assert not self.loop.is_here, "a listener may kill a task, not stop it"
        task.hang_up()
        try:
            task.wait(timeout)
        finally:
            task.kill()
            if not task.wait(KILL_SECONDS):
                task.lose()
                raise TimedOut(f"stop {task!r}: Ray has not ended it within {KILL_SECONDS} s")

    def close(self, timeout: float = 5.0) -> None:
        assert not self.loop.is_here, "a listener may kill a task, not close the engine"
        deadline = time.monotonic() + timeout
        try:
            self.loop.post(self._wind_down)
            self.loop.join(deadline - time.monotonic())
        finally:
            self.loop.post(self._kill_all)
            try:
                if not self.loop.join(KILL_SECONDS):
                    self.loop.post(self.loop.end)
                    self.loop.join(KILL_SECONDS)
                    raise TimedOut(f"close: Ray has not ended all within {KILL_SECONDS} s")
            finally:
                self._room.close()
                if self._ours:
                    self._ours = False
                    ray.shutdown()
        self.loop.raise_kept()

    # The rest runs on the loop's thread.

    def _start(self, what: str, spec: TaskSpec, listener: Listener, target: bytes) -> RayTask:
        if self._closing:
            raise Closed(f"{what}: the engine is closed")
        body = self._bodies.pop(spec.name, None)
        if body is None or replace(body.spec, target=spec.target) != spec:
            if body is not None:
                body.kill()
            body = self._made(what, spec)
        task = RayTask(spec, listener, self, body)
        self._tasks.add(task)
        task._start(target)
        return task

    def _made(self, what: str, spec: TaskSpec) -> _Body:
        options = self._room.options(spec.name, spec.node or self._places.get(spec.name))
        leaves_devices = "num_gpus" in options
        env = hygiene(replace(spec, devices=None) if leaves_devices else spec)
        try:
            made = self._class.options(
                max_restarts=0 if spec.stays else -1,
                runtime_env={"env_vars": env},
                **options,
            ).remote(spec.name)
        except (RayError, ValueError, RuntimeError) as e:
            raise WorkerFailed(f"{what}: {e}") from e
        return _Body(made, spec)

    def moved(self, name: str, address: str, before: str, now: dict[str, Any]) -> None:
        """A task's actor was started again on another node."""
        self._room.moved(name, address, before, now)

    def ended(self, task: RayTask, *, keeps: bool) -> None:
        """A task has ended; whether Ray starts its actor again."""
        self._tasks.discard(task)
        if task.spec.stays and task.body.node:
            self._places[task.name] = task.body.node
        if keeps and not self._closing:
            self._bodies[task.name] = task.body
        elif keeps:
            task.body.kill()
        if self._closing and not self._tasks:
            self.loop.end()

    def _forget(self, name: str) -> None:
        body = self._bodies.pop(name, None)
        if body is not None:
            body.kill()

    def _wind_down(self) -> None:
        self._closing = True
        for name in tuple(self._bodies):
            self._forget(name)
        for task in self._tasks:
            task._hang_up()
        if not self._tasks:
            self.loop.end()

    def _kill_all(self) -> None:
        for task in self._tasks:
            task._kill()

    def _end_all(self) -> None:
        self._closing = True
        self._kill_all()
        for task in tuple(self._tasks):
            task._finish(Exit(signal="SIGKILL"))


def _listed(found: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
