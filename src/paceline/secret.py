"""The secret that a cluster's processes know, in a file that only its owner may read."""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from paceline.core.errors import Refused

VARIABLE = "PACELINE_SECRET_FILE"
LEAST = 16
"""Bytes that a secret has at least."""

HOW = f"(umask 077; head -c 32 /dev/urandom > FILE), and name it by secret_file= or {VARIABLE}"


def default_file() -> Path:
    """Where a user's clusters on one host have their secret, unless told otherwise."""
    return Path.home() / ".paceline" / "secret"


def read(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file; a line's end behind it does not count.

    Raises:
        Refused: there is no such file, others may read or write it, or it is too short.
    """
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(1 << 16).rstrip(b"\r\n")
    except OSError as e:
        raise Refused(
            f"the secret file {path} cannot be read: {e.strerror}; make one: {HOW}"
        ) from e
    if about.st_uid not in (os.getuid(), 0):
        raise Refused(f"the secret file {path} belongs to user {about.st_uid}, not to this one")
    mode = stat.S_IMODE(about.st_mode)
    if mode & 0o077:
        raise Refused(f"the secret file {path} has mode {mode:o}: others may use it; chmod 600 it")
    if len(content) < LEAST:
        raise Refused(
            f"the secret file {path} has {len(content)} bytes, at least {LEAST} are needed"
        )
    return content


def found(
    secret: bytes | None, file: str | os.PathLike[str] | None, addresses: list[str], who: str
) -> bytes:
    """The secret as given, or in the file given, or in the file that the environment names.

    Without any of these it is the user's own, made when it is first needed, as long as only this
    host can reach the addresses.

    Raises:
        Refused: there is none, and other hosts could reach one of the addresses; or as `read`.
    """
    if secret is not None:
        return secret
    file = file or os.environ.get(VARIABLE)
    if file:
        return read(file)
    for address in addresses:
        if not is_local(address):
            raise Refused(
                f"{who} has no secret, and other hosts can reach {address}: make the same file on"
                f" all hosts, {HOW}"
            )
    return _own()


def there(addresses: list[str]) -> bytes:
    """The same, but nothing is made or refused: empty where there is none."""
    file = os.environ.get(VARIABLE)
    if file:
        return read(file)
    if all(map(is_local, addresses)) and default_file().exists():
        return read(default_file())
    return b""


def is_local(address: str) -> bool:
    """Whether only this host can reach an address, as far as that can be seen from its text."""
    if address.startswith(("unix:", "memory:")):
        return True
    host = address.removeprefix("tcp:").removeprefix("//").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _own() -> bytes:
    """The user's own secret; whoever is first makes it, and all have the same."""
    path = default_file()
    fresh = path.with_name(f".secret-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            # Whole, or not at all, and never in the place of one that is there.
            with suppress(FileExistsError):
                os.link(fresh, path)
    except OSError as e:
        raise Refused(f"no secret can be made at {path}: {e.strerror}; make one: {HOW}") from e
    finally:
        with suppress(OSError):
            os.unlink(fresh)
    return read(path)
