"""Which job a rank belongs to, and what is said to strangers at the meeting point."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from rankstep.errors import WorldError
from rankstep.world import store as store_module
from rankstep.world.env import RankEnv
from rankstep.world.identity import (
    Identity,
    all_here,
    check_all_here,
    claim,
    greeting,
    read_identity,
)
from rankstep.world.store import open_store

OURS = Identity("digits", b"secret")
WHERE = "node1 port 29500"


@pytest.fixture
def meeting():
    return HashStore()


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "x", "SLURM_JOB_ID": "7"}, "x"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, "slurm 7"),
        ({"PMIX_NAMESPACE": "prterun-1"}, "prterun-1"),
        ({"RANKSTEP_JOB": "mine", "TORCHELASTIC_RUN_ID": "x"}, "mine"),
    ],
)
def test_the_name_of_the_job(variables, job):
    assert read_identity(variables) == Identity(job, b"")


def test_the_token_is_neither_shown_nor_sent(meeting):
    identity = read_identity({"RANKSTEP_TOKEN": "secret"})
    assert identity.token == b"secret"
    assert "secret" not in repr(identity)
    claim(meeting, identity, "rank 0", WHERE)
    said = [meeting.get("rankstep/job"), greeting(identity, 0), all_here(identity)]
    assert not any("secret" in str(words) for words in said)
    assert greeting(identity, 0) != greeting(identity, 1)


def test_ranks_of_one_job_are_let_in(meeting):
    for rank in range(3):
        claim(meeting, OURS, f"rank {rank}", WHERE)
    assert json.loads(meeting.get("rankstep/job"))["first"].startswith("rank 0, process ")


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (Identity("mnist", b"secret"), ["this rank is of job mnist", "of job digits"]),
        (Identity("digits", b"guess"), ["do not have this job's token (RANKSTEP_TOKEN)"]),
        (Identity("digits", b""), ["this rank has no token"]),
    ],
)
def test_another_job_is_refused_by_name(meeting, other, parts):
    claim(meeting, OURS, "rank 0 of 2", WHERE)
    with pytest.raises(WorldError) as caught:
        claim(meeting, other, "rank 1 of 2", WHERE)
    message = str(caught.value)
    assert message.startswith(f"rank 1 of 2: another job meets at {WHERE}: ")
    assert "the first there was rank 0 of 2, process " in message
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"job": 1}'])
def test_what_a_stranger_has_written_is_refused(meeting, text):
    meeting.set("rankstep/job", text)
    with pytest.raises(WorldError, match="was not written by Rankstep"):
        claim(meeting, OURS, "rank 0", WHERE)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (all_here(OURS), ""),
        (all_here(OURS, [2]), "what called itself rank 2 did not have the job's token"),
        (all_here(Identity("digits", b"guess")), "lacks the job's token"),
        (json.dumps({"code": 1}), "was not rank 0's"),
        ("", "was not rank 0's"),
    ],
)
def test_the_word_that_everybody_is_there(text, problem):
    said = check_all_here(text.encode(), OURS)
    assert problem in said
    assert bool(said) is bool(problem)


@pytest.mark.parametrize(
    ("rank", "key", "text", "problem"),
    [
        (0, "here/1", "", "what called itself rank 1 did not have the job's token and was refused"),
        (1, "all here", "", "the word that everybody is there was not rank 0's"),
        (0, "here/1", greeting(OURS, 1), None),
        (1, "all here", all_here(OURS), None),
    ],
)
def test_a_stranger_cannot_stand_in_for_a_rank(meeting, monkeypatch, rank, key, text, problem):
    monkeypatch.setattr(store_module, "_connect", lambda *_: meeting)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANKSTEP_JOB", OURS.job)
    monkeypatch.setenv("RANKSTEP_TOKEN", OURS.token.decode())
    meeting.set(f"rankstep/0/1/{key}", text)
    env = RankEnv(rank, rank, 2, 2, 0, 1, "127.0.0.1", 29500, "env")
    if problem is None:
        open_store(env, timedelta(seconds=30))
        return
    with pytest.raises(WorldError) as caught:
        open_store(env, timedelta(seconds=30))
    assert problem in str(caught.value)
