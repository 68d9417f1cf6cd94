"""A worker's life: it waits for a function, runs it, and tells its launcher how it went."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import numpy as np

from paceline import blas, functions
from paceline.calling import told
from paceline.core import messages as m
from paceline.core.account import BUSY, IDLE, STARTING
from paceline.core.errors import (
    Closed,
    FunctionError,
    PacelineError,
    SchemaError,
    WasReset,
    WouldBlock,
)
from paceline.engines.base import Link, received
from paceline.handles import PATIENCE
from paceline.lines import account
from paceline.session import Session
from paceline.worker.caller import Caller, last_read
from paceline.worker.collector import Collector, entered, goes_on, let_go
from paceline.worker.handle import Worker
from paceline.worker.line import Ask, Collect, Ended, Held, Load, Setup, Started, Warned


def run(link: Link) -> Generator[bool, None, None]:
    """A worker's life. It yields whether it did something, whenever another could have its turn."""
    session: Session | None = None
    spent = account(STARTING)
    try:
        setup = yield from received(link)
        assert isinstance(setup, Setup)
        if setup.alone:
            seed_libraries(setup.seed)
        channel = setup.channel() if setup.channel is not None else None
        session = Session(
            setup.target, secret=setup.secret, job=setup.job, index=setup.index, channel=channel
        )
        session.lines.conduct.account = spent
        if setup.lasting:
            session.lines.last()
        elif setup.alone:
            # Its launcher starts no server again.
            session.lines.end()
        worker = Worker(setup, session, link)
        caller = Caller(worker, setup.keeps, link.remedy)
        link.send(Started())
        while True:
            worker.turn_to(IDLE)
            job = worker.later.pop(0) if worker.later else (yield from received(link))
            worker.turn_to(BUSY)
            if isinstance(job, Collect):
                yield from _collect(worker, job, setup, link)
            elif isinstance(job, Load):
                caller.load(job)
            elif isinstance(job, Ask):
                link.send(caller.answer(job))
                yield True
    except EOFError:
        # The launcher is gone, or wants no more of us.
        return
    finally:
        if session is not None:
            session.close()


def _collect(worker: Worker, job: Collect, setup: Setup, link: Link) -> Generator[bool, None, None]:
    collector: Collector | None = None
    held: tuple[Held, ...] = ()
    error: str | None = None
    hopeless = False
    worker.begin(job.collection)
    lines = worker.session.lines
    try:
        line = lines.home("collection", job.collection, make=False, timeout=PATIENCE)
        line = entered(worker.session, job.collection)
        # One handle for each name, so that a read through any of its mentions stamps.
        loaded: Any = functions.load(
            job.payload, functools.cache(worker.session.handle), link.remedy
        )
        fn, resources = loaded
        if setup.alone:
            seed_framework(worker.seed)
            _warn(worker, job)
        collector = Collector(worker, job, line, fn, resources, waits=link.waits)
        yield from collector.steps()
    except Closed as e:
        # The collection has ended; a queue of the user's that was closed ends the function too.
        if isinstance(e, WasReset) and goes_on(line, job.collection):
            error, hopeless = told(e), True
    except FunctionError as e:
        error, hopeless = f"FunctionError: {e}", True
    except (WouldBlock, SchemaError) as e:
        error, hopeless = told(e), True
    except Exception as e:
        if not worker.session.lines.alive():
            # Whatever else it says: without a server this process is of no use.
            raise
        where = f"\n({collector.where()})" if collector else ""
        error, hopeless = told(e) + where, collector is None
        if collector is not None:
            held = last_read(resources, setup.keeps)
    if error is None and job.schedule == "lockstep":
        with suppress(PacelineError):
            # Nobody else can take its turns.
            line.call(m.Drain(job.collection))
    let_go(worker.session)
    worker.tell(Ended(job.collection, collector.items if collector else 0, error, hopeless, held))
    yield True


def _warn(worker: Worker, job: Collect) -> None:
    """Say what may keep a run in lockstep from being the same again."""
    if job.schedule == "lockstep":
        text = blas.several(f"{worker.job}:{worker.index}", blas.threads())
        if text is not None:
            worker.tell(Warned(job.collection, text))


def seed_libraries(seed: int) -> None:
    """Seed what every process has, before anything of the user's is loaded."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def seed_framework(seed: int) -> None:
    """Seed what the function has brought along."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
