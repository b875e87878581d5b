"""Which ranks share a host, agreed by all of them, and a socket between each two that do.

Ranks that give the same label (the kernel's boot id, or ``RANKSTEP_HOST``) connect to each other over Unix sockets whose
names live in the network namespace and vanish with their owner, whatever ends it. A label alone decides nothing: ranks
that cannot connect do not share memory, and then no rank of the group does.

Note [Unix sockets]
    They carry the descriptors of memory segments, their messages order the memory accesses around them on every CPU (a
    system call on both sides), a waiting rank sleeps in the kernel, and the end of a peer closes them at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOST_VARIABLE = "RANKSTEP_HOST"
SWITCH_VARIABLE = "RANKSTEP_SHARED_MEMORY"

CONNECT_S = 20.0
"""Long enough for a rank that is slow to start its part; a rank that has ended ends the wait by its exit."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks of a group live.

    Attributes:
        hosts: The group ranks of each host; hosts in the order of their lowest rank.
        host: The position of this rank's host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def owners(self) -> int:
        """How many ranks of each host have their like on all other hosts: as many as the smallest one has."""
        return min(map(len, self.hosts))

    @property
    def several_share(self) -> bool:
        """Some host has more than one rank."""
        return any(len(ranks) > 1 for ranks in self.hosts)

    @classmethod
    def of(cls, labels: Mapping[int, str], rank: int) -> Layout:
        """Put ranks with equal labels on one host."""
        by_label: dict[str, list[int]] = {}
        for each in sorted(labels):
            by_label.setdefault(labels[each], []).append(each)
        hosts = tuple(tuple(ranks) for ranks in by_label.values())
        return cls(hosts, next(i for i, ranks in enumerate(hosts) if rank in ranks))


@dataclass(frozen=True, slots=True)
class Meeting:
    """What came of the ranks' attempt to meet; the same verdict on all of them.

    Attributes:
        layout: Where the ranks live.
        sockets: One for each other rank of this host; empty if ``reason`` says why not.
        pids: Their processes, as far as this one can see them.
        reason: Why memory is not shared though ranks share a host; empty: it is, or nobody asked for it.
    """

    layout: Layout
    sockets: Mapping[int, socket.socket]
    pids: Mapping[int, int]
    reason: str = ""


def host_label() -> str:
    """What tells this host from others: ``RANKSTEP_HOST``, else the kernel's boot id, else the host's name."""
    label = os.environ.get(HOST_VARIABLE)
    if label:
        return f"given {label}"
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return socket.gethostname()


def unable() -> str:
    """Why this process cannot share memory; empty if it can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"it needs Linux, and this is {sys.platform}"
    if os.environ.get(SWITCH_VARIABLE) == "0":
        return f"{SWITCH_VARIABLE}=0"
    try:
        os.close(os.memfd_create("rankstep-probe", os.MFD_CLOEXEC))
    except OSError as error:
        return f"the system gives no shared memory ({error})"
    return ""


def meet(store: Any, rank: int, size: int) -> Meeting:
    """Find out who shares a host and connect; collective.

    Args:
        store: Of the group, under a prefix that nobody has used before.
        rank: This rank in the group.
        size: Of the group.

    Raises:
        RuntimeError: A rank did not leave its card in the store within the store's time-out.
    """
    reason = unable()
    listener, address = (None, "") if reason else _listen(size)
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        if listener is not None:
            stack.enter_context(listener)
        card = {"label": host_label(), "address": address, "token": token, "unable": reason}
        store.set(f"card/{rank}", json.dumps(card))
        cards = {each: json.loads(store.get(f"card/{each}")) for each in range(size)}
        layout = Layout.of({each: card["label"] for each, card in cards.items()}, rank)
        if not layout.several_share:
            return Meeting(layout, {}, {})
        refusals = {each: card["unable"] for each, card in cards.items() if card["unable"]}
        if refusals or listener is None:
            return Meeting(layout, {}, {}, _told(refusals))
        sockets: dict[int, socket.socket] = {}
        try:
            sockets.update(_connect(listener, cards, layout.local, rank))
            failure = ""
        except OSError as error:
            failure = str(error) or type(error).__name__
    store.set(f"met/{rank}", failure)
    failures = {each: store.get(f"met/{each}").decode() for each in range(size)}
    reason = _told({each: text for each, text in failures.items() if text})
    pids = {peer: _credentials(connection)[0] for peer, connection in sockets.items()}
    if reason:
        for connection in sockets.values():
            connection.close()
        return Meeting(layout, {}, {}, reason)
    return Meeting(layout, sockets, pids)


def _told(reasons: Mapping[int, str]) -> str:
    """One line for any number of ranks."""
    texts = sorted(set(reasons.values()))
    return "; ".join(
        f"rank {next(rank for rank, each in reasons.items() if each == text)}: {text}"
        for text in texts[:3]
    )


def _listen(size: int) -> tuple[socket.socket, str]:
    """A socket under a name that the kernel frees with it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"rankstep-{secrets.token_hex(12)}"
    listener.bind(f"\0{address}")
    listener.listen(size)
    return listener, address


def _connect(
    listener: socket.socket, cards: Mapping[int, Any], local: tuple[int, ...], rank: int
) -> Iterator[tuple[int, socket.socket]]:
    """Connect to the lower ranks of this host and be connected to by the higher ones.

    Raises:
        OSError: Says which rank cannot be reached, or that a stranger came.
    """
    for peer in local[: local.index(rank)]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{cards[peer]['address']}")
            connection.send(json.dumps({"rank": rank, "token": cards[peer]["token"]}).encode())
        except OSError as error:
            connection.close()
            raise OSError(
                f"rank {peer} has the same host label but cannot be reached ({error})"
            ) from error
        yield peer, connection
    awaited = set(local[local.index(rank) + 1 :])
    until = time.monotonic() + CONNECT_S
    while awaited:
        listener.settimeout(max(0.0, until - time.monotonic()) or 0.001)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = ", ".join(map(str, sorted(awaited)))
            raise OSError(
                f"rank(s) {missing} have the same host label but did not connect"
            ) from None
        peer = _caller(connection, cards[rank]["token"])
        if peer not in awaited:
            connection.close()
            continue
        awaited.remove(peer)
        yield peer, connection


def _caller(connection: socket.socket, token: str) -> int:
    """Which rank has connected; -1: a stranger."""
    connection.settimeout(CONNECT_S)
    try:
        hello = json.loads(connection.recv(4096))
        known = secrets.compare_digest(str(hello["token"]), token)
        return int(hello["rank"]) if known and _credentials(connection)[1] == os.getuid() else -1
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
