"""What a server does about its cluster: homes of names, containers, being asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core import messages as m
from paceline.core.cluster_state import CHIEFS, Phase
from paceline.core.errors import Closed
from paceline.core.names import beside, checked, checked_container, label
from paceline.core.waiting import NOT_YET
from paceline.server.lines import Peer
from paceline.server.service import Desk, Handler, Service
from paceline.transports.base import Frame

_CAUSE = "cluster"
"""Why peers may not wait, where it is this desk that says so."""


class ClusterDesk(Desk):
    """Where names are at home, what is reset, and whether the cluster goes on.

    `on_change` hears, on the server's thread, of each member that comes or goes, and of a stop; of
    guests it hears no words.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.on_change: Callable[[str], None] = lambda said: None
        self._stopped = False
        service.came_or_went = self._came_or_went

    def handlers(self) -> dict[type, Handler]:
        return {
            m.Enter: self._enter,
            m.Reset: self._reset,
            m.Locate: self._locate,
            m.RequestStop: self._stop,
            m.Stopping: self._stopping,
            m.Restored: self._restored,
            m.Dead: self._dead,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        homes = self._service.cluster.homes
        return "homes", {f"{kind} {label(name)}": home for (kind, name), home in homes.items()}

    def lost(self, peer: Peer) -> None:
        """A name stays at home."""

    def reset(self, gone: Callable[[str], bool]) -> None:
        cluster = self._service.cluster
        cluster.homes = {each: home for each, home in cluster.homes.items() if not gone(each[1])}

    def _enter(self, peer: Peer, request: m.Enter, frame: Frame) -> None:
        generation = self._service.containers.state.generation(checked_container(request.container))
        self._service.answer(peer, frame.request, m.Text(generation))

    def _reset(self, peer: Peer, request: m.Reset, frame: Frame) -> None:
        found = self._service.containers.reset(request.containers, peer.name, request.number)
        self._service.answer(peer, frame.request, m.Text(found))

    def _came_or_went(self, peer: Peer, how: str) -> None:
        spec = self._service.cluster.spec
        guest = spec is None or peer.member is None or peer.member.job not in spec.jobs
        self._changed("" if guest else f"{peer.name} {how}")

    def _changed(self, said: str) -> None:
        """End the waits of all once the cluster is stopped: nobody can be expected to end them."""
        service, cluster = self._service, self._service.cluster
        ending = cluster.reason is not None and cluster.phase is not Phase.RUNNING
        stopped = ending or cluster.final
        for peer in service.peers():
            chief = peer.member is not None and peer.member.job in CHIEFS
            if ending or (stopped and not chief):
                done = Closed(f"the cluster is done: {cluster.reason}")
                service.parking.interrupt(peer, _CAUSE, done)
            elif self._stopped:
                service.parking.allow(peer, _CAUSE)
        self._stopped = stopped
        self.on_change(said)

    def _locate(self, peer: Peer, request: m.Locate, frame: Frame) -> None:
        kind, name = checked(request.kind), checked(request.name)
        cluster = self._service.cluster

        def attempt() -> Any:
            found = cluster.locate(kind, name, request.proposal)
            return found if found is NOT_YET else m.Text(found)

        def what() -> str:
            there = beside(name, [each for of, each in cluster.homes if of == kind])
            return (
                f"nobody has made the {kind} '{name}' on any server; there are {there}; whoever"
                f" makes it ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, ("home", kind, name), attempt, request.timeout, what)
        if request.proposal:
            self._service.parking.changed(("home", kind, name))

    def _stop(self, peer: Peer, request: m.RequestStop, frame: Frame) -> None:
        reason = request.reason or f"{peer.name} asked for it"
        self._service.cluster.stop(reason, failed=request.failed, final=request.final)
        self._service.answer(peer, frame.request, m.Done())
        self._changed(f"{peer.name} asks all to stop: {reason}")

    def _stopping(self, peer: Peer, request: m.Stopping, frame: Frame) -> None:
        cluster = self._service.cluster
        told = None if cluster.reason is None else [cluster.reason, cluster.failed]
        self._service.answer(peer, frame.request, m.Text(told))

    def _dead(self, peer: Peer, request: m.Dead, frame: Frame) -> None:
        if peer.member is not None and peer.member.job in CHIEFS:
            for other in self._service.peers():
                member = other.member
                if member and (member.job, member.index) == (request.job, request.index):
                    self._service.dismiss(other)
        self._service.answer(peer, frame.request, m.Done())

    def _restored(self, peer: Peer, request: m.Restored, frame: Frame) -> None:
        self._service.cluster.restoring = False
        self._service.answer(peer, frame.request, m.Done())
