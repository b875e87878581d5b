"""What every rank does under ``rankstep doctor --network``: connect to all others, then sum something and time it."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from rankstep.errors import WorldError
from rankstep.world.env import is_loopback, read_rank_env
from rankstep.world.identity import read_identity
from rankstep.world.ports import listen
from rankstep.world.store import leave_store, open_store
from rankstep.world.world import world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

    from rankstep.world.env import RankEnv
    from rankstep.world.world import World

_CONNECT_SECONDS = 5.0
_WORD_BYTES = 128
_SIZES = {"4 KiB": 4096, "4 MiB": 4 << 20}
_WARM_UP, _TIMES = 3, 10


@dataclass(frozen=True, slots=True)
class Contact:
    """Where one rank listens; and, once it has tried, which others it could not reach and why."""

    rank: int
    node: int
    host: str
    address: str
    port: int
    failures: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        """The rank, its node and host."""
        return f"rank {self.rank} (node {self.node}, {self.host})"


def main(words: list[str]) -> None:
    """Try the network as this rank, and leave by the exit code.

    Args:
        words: how long to wait for the other ranks, in seconds.
    """
    timeout = timedelta(seconds=float(words[0]))
    env = read_rank_env(os.environ)
    try:
        store = open_store(env, timeout)
        contacts = _contacts(store, env, timeout)
    except (WorldError, dist.DistError) as error:
        _say(f"rankstep doctor: {error}")
        sys.exit(1)
    report, reached = tell(contacts)
    if env.rank == 0:
        _say(report)
    leave_store(store, env, timeout)
    if not reached:
        sys.exit(1)
    with world(timeout=timeout) as opened:
        for name, size_bytes in _SIZES.items():
            taken = _time_all_reduce(opened, size_bytes)
            if env.rank == 0:
                _say(_speed(name, size_bytes, taken, opened.backend))


def tell(contacts: Sequence[Contact]) -> tuple[str, bool]:
    """Say who reaches whom, and whether all do.

    Args:
        contacts: all ranks, in order, after they have tried.
    """
    nodes = sorted({contact.node for contact in contacts})
    lines = [f"rankstep doctor: {_count(len(contacts), 'rank')} on {_count(len(nodes), 'node')}"]
    for node in nodes:
        members = [contact for contact in contacts if contact.node == node]
        ranks = ", ".join(str(contact.rank) for contact in members)
        addresses = ", ".join(sorted({contact.address for contact in members}))
        lines.append(f"  node {node}: {members[0].host}, {addresses}, ranks {ranks}")
    broken = [(one, other, why) for one in contacts for other, why in one.failures]
    for one, other, why in broken:
        target = contacts[other]
        lines.append(
            f"  {one.name} cannot reach {target.name} at {target.address} port {target.port}: {why}"
        )
    if broken:
        lines.append(
            "  Next: see whether a firewall between these hosts closes ports above 1024, and whether the address is one that "
            "the other host has a route to; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface to use."
        )
    else:
        pairs = len(contacts) * (len(contacts) - 1)
        lines.append(f"  each rank reaches each other one: {_count(pairs, 'connection')}")
    return "\n".join(lines), not broken


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _contacts(store: Store, env: RankEnv, timeout: timedelta) -> list[Contact]:
    """Listen, connect to all others, and return what all have found."""
    address = own_address(env)
    with listen(address, 0) as listener:
        port = listener.getsockname()[1]
        me = Contact(env.rank, env.node, socket.gethostname(), address, port)
        threading.Thread(target=_answer, args=(listener, env.rank), daemon=True).start()
        everyone = _exchange(store, env, "listens", me, timeout)
        failures = [
            (other.rank, why)
            for other in everyone
            if other.rank != env.rank and (why := try_to_reach(other, env.rank))
        ]
        tried = Contact(env.rank, env.node, me.host, address, port, tuple(failures))
        try:
            # Until all have tried, everybody goes on listening.
            return _exchange(store, env, "tried", tried, timeout)
        finally:
            # Closing alone would not wake the thread.
            listener.shutdown(socket.SHUT_RDWR)


def _exchange(
    store: Store, env: RankEnv, step: str, contact: Contact, timeout: timedelta
) -> list[Contact]:
    keys = [f"{step}/{rank}" for rank in range(env.world_size)]
    store.set(keys[env.rank], json.dumps(asdict(contact)))
    store.wait(keys, timeout + timedelta(seconds=_CONNECT_SECONDS * env.world_size))
    found = []
    for key in keys:
        told = json.loads(store.get(key))
        told["failures"] = tuple((int(rank), str(why)) for rank, why in told["failures"])
        found.append(Contact(**told))
    return found


def own_address(env: RankEnv) -> str:
    """Return this host's address as the others see it: loopback on one host, else that of the way to rank 0's host.

    Args:
        env: this rank's place and meeting point.
    """
    if env.node_count == 1 or env.master_addr is None or is_loopback(env.master_addr):
        return "127.0.0.1"
    target = socket.getaddrinfo(env.master_addr, env.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only looks up the route.
        probe.connect(target[4])
        return str(probe.getsockname()[0])


def _word(rank: int) -> bytes:
    identity = read_identity(os.environ)
    return f"rank {rank} {identity.code(f'probe {rank}')}".ljust(_WORD_BYTES).encode()


def _answer(listener: socket.socket, rank: int) -> None:
    """Tell everybody who connects which rank this is, until the socket is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                connection.sendall(_word(rank))
            except OSError:
                continue


def try_to_reach(other: Contact, rank: int) -> str:
    """Connect to another rank and hear who answers; return what went wrong, "" if nothing did.

    Args:
        other: where it listens.
        rank: who tries.
    """
    try:
        with socket.create_connection((other.address, other.port), _CONNECT_SECONDS) as connection:
            heard = b""
            while len(heard) < _WORD_BYTES and (data := connection.recv(_WORD_BYTES)):
                heard += data
    except TimeoutError:
        return f"no answer within {_CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"{error.strerror or error}"
    if heard != _word(other.rank):
        return f"somebody else answers rank {rank} there"
    return ""


def _time_all_reduce(opened: World, size_bytes: int) -> float:
    """Return the median seconds of one sum over all ranks."""
    tensor = torch.ones(size_bytes // 4, device=opened.device)
    taken = []
    for _ in range(_WARM_UP + _TIMES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        # Reading a value waits for the device.
        tensor[0].item()
        taken.append(time.perf_counter() - start)
        tensor.fill_(1.0)
    return statistics.median(taken[_WARM_UP:])


def _speed(name: str, size_bytes: int, seconds: float, backend: str) -> str:
    return (
        f"  all-reduce of {name} ({backend}): {seconds * 1e3:.2f} ms, "
        f"{size_bytes / seconds / 1e6:.0f} MB/s of data"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
