"""The store at which the ranks meet, and the roll call that says who is missing."""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from rankstep.errors import WorldError
from rankstep.world import identity
from rankstep.world.ports import announce, listen, port_holder

if TYPE_CHECKING:
    import socket

    from torch._C._distributed_c10d import Store

    from rankstep.world.env import RankEnv

_ALL_HERE = "all here"
_LEFT = "left"
_NOTE_AFTER = timedelta(seconds=5)
"""Who has not come by then is told, once; imports and slow disks may well keep ranks apart for longer."""

# Kept for the life of the process: closing a store while a peer reconnects to it would cut that peer off.
_connections: dict[tuple[int, str, int], TCPStore] = {}


def open_store(env: RankEnv, timeout: timedelta) -> Store:
    """Open the ranks' common store and wait until every rank is there.

    Under torchrun and `rankstep run` the launcher hosts it and all ranks are clients; otherwise rank 0 hosts it,
    on loopback alone when the ranks meet on a loopback address. A world of one keeps it in its own memory.

    Args:
        env: this rank's place and meeting point.
        timeout: how long to wait for the other ranks.

    Raises:
        WorldError: the port is taken, rank 0 cannot be reached, another job meets there, or some ranks did not arrive.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
    """
    if env.world_size == 1 or env.master_addr is None or env.master_port is None:
        return HashStore()
    tcp = _connect(env, env.master_addr, env.master_port, timeout)
    job = identity.read_identity(os.environ)
    who, where = f"rank {env.rank} of {env.world_size}", f"{env.master_addr} port {env.master_port}"
    identity.claim(tcp, job, who, where)
    # A restarted group, or a second world in one process, meets in the same store, where old keys still lie. A store that
    # rank 0 hosts is as young as the group, and the nodes of an elastic job have not seen equally many restarts.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if hosted else "0"
    attempt = f"rankstep/{restarts}"
    opened = tcp.add(f"{attempt}/opened/{env.rank}", 1)
    store = PrefixStore(f"{attempt}/{opened}", tcp)
    store.set_timeout(timeout)
    _roll_call(store, env, timeout, job)
    return store


def hosts_store(env: RankEnv) -> bool:
    """Tell whether this rank, and not its launcher, hosts the store."""
    return env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def leave_store(store: Store, env: RankEnv, timeout: timedelta) -> None:
    """Tell the host of the store that this rank needs it no more; the host waits until all have said so.

    Without it a rank 0 that ends first would take the store away from ranks that are about to read from it.

    Args:
        store: what `open_store` returned.
        env: this rank's place.
        timeout: how long the host waits at most.
    """
    if env.world_size == 1:
        return
    deadline = time.monotonic() + timeout.total_seconds()
    # A store that is gone cannot be missed any more.
    with suppress(dist.DistError):
        left = store.add(_LEFT, 1)
        while hosts_store(env) and left < env.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            left = store.add(_LEFT, 0)


def _connect(env: RankEnv, master_addr: str, port: int, timeout: timedelta) -> TCPStore:
    addr = "127.0.0.1" if master_addr == "localhost" else master_addr.strip("[]")
    key = (os.getpid(), addr, port)
    if key in _connections:
        return _connections[key]
    listener = _listen(env, addr, port) if hosts_store(env) else None
    try:
        _connections[key] = TCPStore(
            addr,
            port,
            env.world_size,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except dist.DistError as error:
        raise WorldError(
            f"rank {env.rank} of {env.world_size}: the ranks' store at {addr} port {port} does not answer "
            f"({_first_line(error)}). Next: see whether rank 0 has started, whether MASTER_ADDR is its host as seen "
            "from here, and whether a firewall closes the port."
        ) from error
    return _connections[key]


def _listen(env: RankEnv, addr: str, port: int) -> socket.socket:
    try:
        listener = listen(addr, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise WorldError(
            f"rank 0 of {env.world_size}: port {port} (MASTER_PORT) is taken by {port_holder(port)}, so the ranks "
            "cannot meet there. Next: end that process, or export another MASTER_PORT on every rank; `rankstep run` "
            "finds a free one by itself."
        ) from error
    announce("rank 0", listener)
    return listener


def _roll_call(store: Store, env: RankEnv, timeout: timedelta, job: identity.Identity) -> None:
    everyone = [f"here/{rank}" for rank in range(env.world_size)]
    store.set(everyone[env.rank], identity.greeting(job, env.rank))
    problem = ""
    try:
        if env.rank == 0:
            _wait(store, everyone, timeout, everyone)
            refused = identity.strangers(store, job, everyone)
            store.set(_ALL_HERE, identity.all_here(job, refused))
            problem = identity.tell_refused(refused) if refused else ""
        else:
            _wait(store, [_ALL_HERE], timeout, everyone)
            problem = identity.check_all_here(store.get(_ALL_HERE), job)
    except dist.DistError as error:
        raise WorldError(
            f"rank {env.rank} of {env.world_size}: {_absent(store, everyone)} within {timeout.total_seconds():g} s "
            f"({_first_line(error)}). Next: see why they did not start, or whether they were given another "
            f"MASTER_ADDR or MASTER_PORT than {env.master_addr}:{env.master_port}."
        ) from error
    if problem:
        raise WorldError(
            f"rank {env.rank} of {env.world_size}: at {env.master_addr} port {env.master_port} {problem}. Next: see what "
            f"else connects there; all ranks of one job need the same {identity.TOKEN}."
        )


def _wait(store: Store, keys: list[str], timeout: timedelta, everyone: list[str]) -> None:
    """Wait for these keys; once that takes long, say who has not arrived."""
    if timeout > _NOTE_AFTER:
        try:
            store.wait(keys, _NOTE_AFTER)
        except dist.DistStoreError:
            timeout -= _NOTE_AFTER
            # The same words on all ranks, so that the launcher shows them once.
            sys.stderr.write(
                f"rankstep: {_absent(store, everyone)} within {_NOTE_AFTER.total_seconds():g} s; waiting for "
                f"{timeout.total_seconds():g} s more\n"
            )
            sys.stderr.flush()
        else:
            return
    store.wait(keys, timeout)


def _absent(store: Store, everyone: list[str]) -> str:
    try:
        absent = [str(rank) for rank, key in enumerate(everyone) if not store.check([key])]
    except dist.DistError:
        return "rank 0, which hosts the store, went away and the roll call did not end"
    if not absent:
        return "rank 0 did not finish the roll call"
    return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)} did not arrive"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
