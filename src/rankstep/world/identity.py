"""Which job a rank belongs to: its name and a secret token, compared where the ranks meet.

Two jobs that were given the same address would otherwise wait for each other, or worse, train together. The token
itself never travels: ranks show codes that only its holders can compute (HMAC).
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankstep.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._C._distributed_c10d import Store

# The job's name and its token, the same on every rank; `rankstep run` sets the token for jobs on one node.
JOB = "RANKSTEP_JOB"
TOKEN = "RANKSTEP_TOKEN"  # noqa: S105 - a variable's name

_KEY = "rankstep/job"
_EVERYBODY = "everybody is here"


@dataclass(frozen=True, slots=True)
class Identity:
    """A job's name ("" if nothing tells it) and its token (empty if there is none)."""

    job: str
    token: bytes = field(repr=False)

    def code(self, statement: str) -> str:
        """Return a code that shows the token's possession without showing the token; "" without a token.

        Args:
            statement: what is said; a code is good for nothing else.

        Source: https://www.rfc-editor.org/rfc/rfc2104
        """
        return hmac.new(self.token, statement.encode(), "sha256").hexdigest() if self.token else ""


def read_identity(environ: Mapping[str, str]) -> Identity:
    """Read which job this process belongs to.

    Args:
        environ: the variables, usually ``os.environ``.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    # Steps are left out: a job may start its nodes by a step each.
    slurm = environ.get("SLURM_JOB_ID", "")
    job = (
        environ.get(JOB)
        or ("" if run == "none" else run)
        or (f"slurm {slurm}" if slurm else environ.get("PMIX_NAMESPACE", ""))
    )
    return Identity(job, environ.get(TOKEN, "").encode())


def claim(store: Store, identity: Identity, who: str, where: str) -> None:
    """Write this job's name at the meeting point, or see that the name there is its own.

    Args:
        store: the meeting point, without any prefix.
        identity: this rank's job.
        who: this rank, for the message.
        where: the meeting point's address, for the message.

    Raises:
        WorldError: another job meets there.
    """
    code = identity.code(f"the store of job {identity.job}")
    place = f"process {os.getpid()} on {socket.gethostname()}"
    mine = {"job": identity.job, "code": code, "first": f"{who}, {place}"}
    text = store.compare_set(_KEY, "", json.dumps(mine)).decode(errors="replace")
    try:
        theirs = {key: str(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        theirs = {}
    if not theirs.keys() >= mine.keys():
        raise WorldError(
            f"{who}: what stands at {where} under {_KEY} was not written by Rankstep: {text[:80]!r}. "
            "Next: choose another port, on every rank."
        )
    if identity.job and theirs["job"] and identity.job != theirs["job"]:
        difference = (
            f"this rank is of job {identity.job}, and the ranks there of job {theirs['job']}"
        )
    elif not hmac.compare_digest(code, theirs["code"]):
        difference = f"the ranks there do not have this job's token ({TOKEN})"
        if not code or not theirs["code"]:
            side = "this rank has no" if not code else "the ranks there have no"
            difference = f"{side} token ({TOKEN}), the other side has one"
    else:
        return
    raise WorldError(
        f"{who}: another job meets at {where}: {difference}; the first there was {theirs['first']}. "
        f"Next: give each job a port of its own; all ranks of one job need the same {JOB} and {TOKEN}."
    )


def greeting(identity: Identity, rank: int) -> str:
    """Return what a rank says when it arrives; a stranger without the token cannot say it."""
    return identity.code(f"rank {rank} is here")


def strangers(store: Store, identity: Identity, keys: Sequence[str]) -> list[int]:
    """Return the ranks whose greeting is not that of this job.

    Args:
        store: where the greetings lie.
        identity: this rank's job.
        keys: the key of each rank's greeting, by rank.
    """
    if not identity.token:
        return []
    said = store.multi_get(list(keys))
    return [
        rank
        for rank, words in enumerate(said)
        if not hmac.compare_digest(words, greeting(identity, rank).encode())
    ]


def all_here(identity: Identity, refused: Sequence[int] = ()) -> str:
    """Return what rank 0 tells all when everybody is there, or whom it has refused."""
    return json.dumps({"code": identity.code(_EVERYBODY), "refused": list(refused)})


def check_all_here(text: bytes, identity: Identity) -> str:
    """Return what is wrong with rank 0's word, "" if nothing is.

    Args:
        text: what `all_here` has made on rank 0.
        identity: this rank's job.
    """
    try:
        word = json.loads(text)
        code, refused = str(word["code"]), [int(rank) for rank in word["refused"]]
    except (ValueError, TypeError, KeyError):
        return "the word that everybody is there was not rank 0's"
    if not hmac.compare_digest(code, identity.code(_EVERYBODY)):
        return "the word that everybody is there was not rank 0's: it lacks the job's token"
    return tell_refused(refused) if refused else ""


def tell_refused(refused: Sequence[int]) -> str:
    """Say which arrivals rank 0 has refused."""
    named = ", ".join(map(str, refused))
    return f"what called itself rank {named} did not have the job's token and was refused"
