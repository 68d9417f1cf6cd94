"""Attackers of TLS itself, beside those who speak nonsense inside of it."""

from __future__ import annotations

import ssl
from random import Random

from fuzz.attack import Attacker, Raw, Style
from fuzz.frames import Breaker
from fuzz.records import broken, made_up

from paceline.core.handshake import ANSWER


class SealedAttacker(Attacker):
    """Makes connections to servers that want TLS over TCP; those at Unix sockets have none."""

    def __init__(
        self, targets: list[str], secret: bytes, seed: int, index: int, context: ssl.SSLContext
    ) -> None:
        super().__init__(targets, secret, seed, index)
        self._context = context
        self._own = [
            self._plain, self._half, self._unproved, self._records, self._records, self._closing,
        ]  # fmt: skip

    def style(self, random: Random, target: str) -> Style:
        if target.startswith("unix:") or random.random() < 0.4:
            return super().style(random, target)
        return random.choice(self._own)

    def ready(self, raw: Raw, style: Style | None) -> None:
        if style in self._own:
            return
        if not raw.shares:
            sealed = raw.sealed(self._context)
            if style == self._stranger:
                sealed.shake()
        super().ready(raw, style)

    def _plain(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Who speaks no TLS."""
        said = random.choice(
            [breaker.frame(1), random.randbytes(ANSWER), b"GET / HTTP/1.1\r\n\r\n", made_up(random)]
        )
        self._last(raw, random, said)

    def _half(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """A handshake that is cut short, or goes on with something else."""
        sealed = raw.sealed(self._context)
        said = sealed.flight()
        assert said is not None
        if random.random() < 0.5:
            raw.say(said)
            said = sealed.flight() or made_up(random)
        way = random.randrange(4)
        if way == 0:
            said = said[: random.randrange(len(said))]
        elif way == 1:
            said = broken([said], random)
        elif way == 2:
            said += said
        else:
            said = made_up(random) + said
        if random.random() < 0.3:
            self.slowly(raw, random, said, raw.say)
        else:
            self._last(raw, random, said)

    def _unproved(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Who has shaken hands with TLS, and does not know the secret."""
        sealed = raw.sealed(self._context)
        sealed.shake()
        data = random.choice([b"x", random.randbytes(ANSWER), breaker.frame(1), bytes(200_000)])
        self._last(raw, random, b"".join(sealed.records(data)))

    def _records(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Who knows the secret, and sends broken records."""
        sealed = raw.sealed(self._context)
        raw.prove(self._secret)
        self._join(raw, random)
        frames = [breaker.frame(n, passable=True) for n in range(1, random.choice([2, 5]))]
        records = [record for frame in frames for record in sealed.records(frame)]
        said = broken(records, random)
        if random.random() < 0.1:
            self.slowly(raw, random, said, raw.say)
        else:
            self._last(raw, random, said)

    def _closing(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Who takes its leave in the midst of a frame, and then says more."""
        sealed = raw.sealed(self._context)
        raw.prove(self._secret)
        self._join(raw, random)
        frame = breaker.frame(1, passable=True)
        before = sealed.records(frame[: random.randrange(1, len(frame) + 1)])
        after = sealed.records(frame) if random.random() < 0.5 else [made_up(random)]
        self._last(raw, random, b"".join([*before, sealed.farewell(), *after]))

    def _last(self, raw: Raw, random: Random, said: bytes) -> None:
        """Say it, and hear nothing more, or all that there is to hear."""
        self.told["frames"] += 1
        self.told["of TLS"] += 1
        if not raw.say(said):
            return
        if random.random() < 0.2:
            raw.reset()
            return
        raw.half_close()
        if random.random() < 0.5:
            while raw.heard():
                """It may be an alert."""
