"""Which rank this process is, read from the variables that its launcher has set.

Pure: a mapping goes in, a frozen `RankEnv` comes out; nothing is opened, asked or changed. The launchers known are
torchrun (and so `rankstep run`), mpirun and srun; scripts that export ``RANK`` and ``WORLD_SIZE`` themselves work too.
"""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rankstep.errors import WorldError
from rankstep.world import slurm

if TYPE_CHECKING:
    from collections.abc import Mapping

Source = Literal["torchrun", "env", "mpi", "slurm", "none", "adopted"]

# Below the range from which Linux picks ports for outgoing connections, so that a derived port is rarely taken.
_FIRST_DERIVED_PORT = 15000
_DERIVED_PORTS = 10000


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Where this process stands among the ranks.

    ``master_addr`` and ``master_port`` are None only in a world of one. ``source`` tells whose variables were read:
    ``torchrun``, ``env`` (a bare ``RANK`` and ``WORLD_SIZE``), ``mpi``, ``slurm``, ``none``, or ``adopted`` when the
    process group was there already and the variables do not describe it.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    node_count: int
    master_addr: str | None
    master_port: int | None
    source: Source


@dataclass(frozen=True, slots=True)
class _Names:
    """What one launcher calls the six numbers."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node: str = "GROUP_RANK"
    node_count: str = "GROUP_WORLD_SIZE"


_TORCH = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Names(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_rank_env(environ: Mapping[str, str]) -> RankEnv:
    """Read rank, place and meeting point from a launcher's variables.

    torchrun's variables win over mpirun's, and those over SLURM's, because that is the order in which one launcher
    runs inside the other. A SLURM allocation without ``srun`` (a batch script, an interactive shell) is a world of
    one: nobody has started the other ranks. Empty variables count as unset.

    Args:
        environ: the variables, usually ``os.environ``.

    Raises:
        WorldError: a number is missing, no number, or out of range; or several ranks have no address to meet at.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
    https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    """
    variables = {name: value for name, value in environ.items() if value.strip()}
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _from_torch(variables)
    found = _from_launcher(variables)
    if found is None:
        return _alone(variables)
    stated = _number(variables, "WORLD_SIZE")
    if stated is not None and stated != found.world_size:
        raise _problem(
            "WORLD_SIZE",
            variables["WORLD_SIZE"],
            f"the launcher ({found.source}) has started {found.world_size} ranks",
            "unset WORLD_SIZE, or start that many ranks",
        )
    return found


def adopted_rank_env(environ: Mapping[str, str], rank: int, world_size: int) -> RankEnv:
    """Describe a process group that somebody else has opened.

    The variables are believed when they name the same rank and size. Otherwise (ranks started by
    ``torch.multiprocessing.spawn``, say) all ranks are taken to be on this host.

    Args:
        environ: the variables, usually ``os.environ``.
        rank: this process's rank in the open group.
        world_size: the number of ranks in the open group.
    """
    try:
        read = read_rank_env(environ)
    except WorldError:
        read = None
    if read is not None and (read.rank, read.world_size) == (rank, world_size):
        return read
    return RankEnv(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node=0,
        node_count=1,
        master_addr=None,
        master_port=None,
        source="adopted",
    )


def is_loopback(address: str) -> bool:
    """Tell whether an address stays on this host: ``localhost``, ``127.x.x.x`` or ``::1``."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _alone(variables: Mapping[str, str]) -> RankEnv:
    size = _number(variables, "WORLD_SIZE")
    if size is not None and size != 1:
        raise _problem(
            "WORLD_SIZE",
            variables["WORLD_SIZE"],
            "no variable says which rank this is (RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID)",
            "start the ranks with `rankstep run`, torchrun, mpirun or srun, or export RANK for each",
        )
    if "RANK" in variables and _number(variables, "RANK") != 0:
        raise _problem(
            "RANK",
            variables["RANK"],
            "WORLD_SIZE is not set, so nobody knows how many ranks there are",
            "export WORLD_SIZE too, or start the ranks with `rankstep run`",
        )
    return RankEnv(0, 0, 1, 1, 0, 1, None, None, "none")


def _from_torch(variables: Mapping[str, str]) -> RankEnv:
    torchrun = "TORCHELASTIC_RUN_ID" in variables or "GROUP_RANK" in variables
    source: Source = "torchrun" if torchrun else "env"
    if not torchrun and "LOCAL_WORLD_SIZE" not in variables:
        # Job scripts often export RANK and WORLD_SIZE around srun or mpirun; where each rank sits only those know.
        found = _from_launcher(variables)
        if found and (found.rank, found.world_size) == _rank_and_size(variables, _TORCH):
            return replace(found, source="env")
    return _place(variables, _TORCH, _master(variables, "", None), source)


def _from_launcher(variables: Mapping[str, str]) -> RankEnv | None:
    if _OPEN_MPI.rank in variables or _OPEN_MPI.world_size in variables:
        return _from_mpi(variables, _OPEN_MPI)
    # srun can set PMI_RANK as well; only mpirun tells the rank on this host along with it.
    if _PMI.local_rank in variables and (_PMI.rank in variables or _PMI.world_size in variables):
        return _from_mpi(variables, _PMI)
    return _from_slurm(variables) if slurm.in_step(variables) else None


def _from_mpi(variables: Mapping[str, str], names: _Names) -> RankEnv:
    _, size = _rank_and_size(variables, names)
    one_host = _number(variables, names.local_world_size) == size
    hosts = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    default_addr = "127.0.0.1" if one_host else slurm.first_host(hosts) if hosts else ""
    # One mpirun is one job: its name is the same on all ranks and differs between jobs that share a host.
    job = next(
        (
            variables[name]
            for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
            if name in variables
        ),
        None,
    )
    default_port = _derived_port(zlib.crc32(job.encode())) if job else None
    return _place(variables, names, _master(variables, default_addr, default_port), "mpi")


def _from_slurm(variables: Mapping[str, str]) -> RankEnv:
    step = slurm.read_step(variables, _number)
    _check_range("SLURM_PROCID", step.rank, "SLURM_NTASKS", step.world_size)
    _check_range("SLURM_LOCALID", step.local_rank, "the tasks on this node", step.local_world_size)
    _check_range("SLURM_NODEID", step.node, "SLURM_NNODES", step.node_count)
    default_addr = "127.0.0.1" if step.node_count == 1 else step.first_host
    job = _number(variables, "SLURM_JOB_ID", "SLURM_JOBID")
    # The last four digits of the job are what other trainers use too; the step keeps two steps of one job apart.
    default_port = None if job is None else _derived_port(job + 1009 * step.step)
    master_addr, master_port = _master(variables, default_addr, default_port)
    if step.world_size > 1:
        _require_master(master_addr, master_port, step.rank, step.world_size)
    return RankEnv(
        rank=step.rank,
        local_rank=step.local_rank,
        world_size=step.world_size,
        local_world_size=step.local_world_size,
        node=step.node,
        node_count=step.node_count,
        master_addr=master_addr,
        master_port=master_port,
        source="slurm",
    )


def _place(
    variables: Mapping[str, str],
    names: _Names,
    master: tuple[str | None, int | None],
    source: Source,
) -> RankEnv:
    """Complete rank and size with the place: which rank of which node, out of how many."""
    master_addr, master_port = master
    rank, size = _rank_and_size(variables, names)
    if size > 1:
        _require_master(master_addr, master_port, rank, size)
    node_count = _number(variables, names.node_count)
    local_rank = _number(variables, names.local_rank)
    local_size = _number(variables, names.local_world_size)
    if local_size is None:
        if size == 1 or node_count == 1 or (master_addr is not None and is_loopback(master_addr)):
            local_size = size
        elif local_rank is None:
            # One rank per node is what bare RANK and WORLD_SIZE mean on Kubernetes: a pod each.
            local_size = 1
        else:
            raise _problem(
                names.local_rank,
                variables[names.local_rank],
                f"{names.local_world_size} is not set, so nobody knows how many ranks share this host",
                f"export {names.local_world_size} (the number of ranks on this host)",
            )
    if not 1 <= local_size <= size:
        raise _problem(
            names.local_world_size,
            str(local_size),
            f"there are {size} ranks in all ({names.world_size}), and one at least is on this host",
            f"set {names.local_world_size} to the number of ranks on this host",
        )
    if local_rank is None:
        local_rank = rank % local_size
    _check_range(names.local_rank, local_rank, names.local_world_size, local_size)
    node = _number(variables, names.node)
    if node is None or node_count is None:
        node, node_count = _guess_node(names, rank, size, local_rank, local_size)
    _check_range(names.node, node, names.node_count, node_count)
    return RankEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=size,
        local_world_size=local_size,
        node=node,
        node_count=node_count,
        master_addr=master_addr,
        master_port=master_port,
        source=source,
    )


def _guess_node(
    names: _Names, rank: int, size: int, local_rank: int, local_size: int
) -> tuple[int, int]:
    """Find the node by the two usual ways of dealing ranks to equal nodes: in blocks, or one after the other."""
    nodes, rest = divmod(size, local_size)
    if rest == 0 and local_rank == rank % local_size:
        return rank // local_size, nodes
    if rest == 0 and local_rank == rank // nodes:
        return rank % nodes, nodes
    raise _problem(
        names.local_rank,
        str(local_rank),
        f"rank {rank} of {size} with {local_size} ranks on this host fits no even deal of ranks to nodes",
        f"export {names.node} (this node's index) and {names.node_count} (the number of nodes)",
    )


def _rank_and_size(variables: Mapping[str, str], names: _Names) -> tuple[int, int]:
    size = _number(variables, names.world_size)
    rank = _number(variables, names.rank)
    if size is None:
        raise _problem(
            names.rank,
            variables[names.rank],
            f"{names.world_size} is not set",
            f"export {names.world_size} (the number of ranks) as well",
        )
    if rank is None:
        raise _problem(
            names.world_size,
            variables[names.world_size],
            f"{names.rank} is not set, so nobody knows which rank this is",
            f"export {names.rank} (0 to {size - 1}) for each process",
        )
    _check_range(names.rank, rank, names.world_size, size)
    return rank, size


def _master(
    variables: Mapping[str, str], default_addr: str, default_port: int | None
) -> tuple[str | None, int | None]:
    port = _number(variables, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise _problem(
            "MASTER_PORT",
            str(port),
            "ports go from 1 to 65535",
            "export a free port of rank 0's host",
        )
    addr = variables.get("MASTER_ADDR") or default_addr
    return addr or None, default_port if port is None else port


def _require_master(addr: str | None, port: int | None, rank: int, size: int) -> None:
    missing = [
        name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value is None
    ]
    if missing:
        raise WorldError(
            f"rank {rank} of {size}: {' and '.join(missing)} not set, and no launcher's variable to derive it from, so "
            "the ranks have nowhere to meet. Start them with `rankstep run`, or export MASTER_ADDR (the host of rank 0) "
            "and MASTER_PORT (a free port there), the same on every rank."
        )


def _derived_port(number: int) -> int:
    return _FIRST_DERIVED_PORT + number % _DERIVED_PORTS


def _number(variables: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set, as a whole number."""
    for name in names:
        if name in variables:
            try:
                return int(variables[name])
            except ValueError as error:
                cause, next_step = "it is not a whole number", f"correct or unset {name}"
                raise _problem(name, variables[name], cause, next_step) from error
    return None


def _check_range(name: str, value: int, bound_name: str, bound: int) -> None:
    if bound < 1:
        raise _problem(
            bound_name,
            str(bound),
            "it counts ranks or nodes, so it is at least 1",
            f"correct {bound_name}",
        )
    if not 0 <= value < bound:
        raise _problem(
            name,
            str(value),
            f"{bound_name} is {bound}, so it goes from 0 to {bound - 1}",
            f"correct {name} or {bound_name} where the ranks are started",
        )


def _problem(name: str, value: str, cause: str, next_step: str) -> WorldError:
    return WorldError(f"{name}={value}: {cause}. Next: {next_step}.")
