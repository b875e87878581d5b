"""SLURM's own notations: is this a step, how many tasks on which node, which host is first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankstep.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# SLURM numbers its special steps (batch script, interactive shell, extern) from here up; they run one task.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class Step:
    """One task of a step started by srun, in SLURM's numbers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    node_count: int
    first_host: str
    step: int


def in_step(variables: Mapping[str, str]) -> bool:
    """Tell whether srun has started this process as one of its tasks.

    Batch scripts and interactive shells see ``SLURM_NTASKS`` too, and a batch script even ``SLURM_PROCID=0``, but
    they are one process: only a step, or a task number above 0, proves that srun has started the others.

    Args:
        variables: the process's variables, without empty ones.
    """
    if "SLURM_PROCID" not in variables or not any(
        name in variables for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS")
    ):
        return False
    step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID")
    if step is not None and step.isdigit():
        return int(step) < _FIRST_SPECIAL_STEP
    return "SLURM_STEP_NUM_TASKS" in variables or variables["SLURM_PROCID"] != "0"


def read_step(variables: Mapping[str, str], number: Callable[..., int | None]) -> Step:
    """Read a task's place in its step.

    The step's own variables (``SLURM_STEP_*``) come first: those of the job may describe a bigger allocation.

    Args:
        variables: the process's variables, without empty ones; `in_step` holds for them.
        number: reads the first of the named variables that is set, as a whole number or None.

    Raises:
        WorldError: the number of tasks on this node follows from no variable.
    """
    rank = number(variables, "SLURM_PROCID") or 0
    size = number(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or 0
    hosts = next(
        (
            variables[name]
            for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
            if name in variables
        ),
        "",
    )
    nodes = number(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    tasks = _tasks_per_node(variables, size, nodes, number)
    node = number(variables, "SLURM_NODEID")
    if node is None:
        node = next((index for index in range(nodes) if rank < sum(tasks[: index + 1])), nodes - 1)
    local_rank = number(variables, "SLURM_LOCALID")
    if local_rank is None:
        local_rank = rank - sum(tasks[:node])
    return Step(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=tasks[node] if 0 <= node < nodes else 1,
        node=node,
        node_count=nodes,
        first_host=first_host(hosts),
        step=number(variables, "SLURM_STEP_ID", "SLURM_STEPID") or 0,
    )


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM list: ``node01`` of ``node[01-03,07],login2``.

    Args:
        hosts: a list as in ``SLURM_JOB_NODELIST``.
    """
    # The first comma outside brackets ends the first entry.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    entry = first.group() if first else ""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry).strip()


def expand_counts(text: str) -> list[int]:
    """Expand SLURM's counts per node: ``4(x2),3`` is 4, 4, 3.

    Args:
        text: a list as in ``SLURM_TASKS_PER_NODE``.

    Raises:
        WorldError: the text is not in SLURM's notation.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise WorldError(
                f"SLURM_TASKS_PER_NODE={text}: it is not in SLURM's notation, such as 4(x2),3. "
                "Next: correct or unset it."
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _tasks_per_node(
    variables: Mapping[str, str], size: int, nodes: int, number: Callable[..., int | None]
) -> list[int]:
    """Return the count of tasks of every node, from the first source that agrees with the step's total."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in variables:
            counts = expand_counts(variables[name])
            if len(counts) == nodes and sum(counts) == size:
                return counts
    even = number(variables, "SLURM_NTASKS_PER_NODE")
    if even is not None and even * nodes == size:
        return [even] * nodes
    if nodes > 0 and size % nodes == 0:
        return [size // nodes] * nodes
    raise WorldError(
        f"SLURM_NTASKS={size}: the tasks are not even over SLURM_NNODES={nodes}, and SLURM_TASKS_PER_NODE="
        f"{variables.get('SLURM_TASKS_PER_NODE', '(not set)')} does not add up to them. "
        "Next: start the step with srun --ntasks-per-node, or export MASTER_ADDR, RANK, LOCAL_RANK and their sizes."
    )
