"""What happens to ranks of one host when one of them ends, stops, runs out of memory or wants something else."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.collectives import HostCommunicator, lookout
from rankstep.collectives.failures import naming_failure
from rankstep.errors import CommunicationError, RankSkewError, StoppedRankWarning

CPU = torch.device("cpu")
SHM = Path("/dev/shm")  # noqa: S108 - looked at only


def killed(me, when):
    """Rank 1 ends without a word, before it posts or between its post and its part."""
    comm = HostCommunicator()
    tensor = comm.allocate(1000, torch.float32, CPU)
    comm.all_reduce(tensor).wait()
    if me.rank == 1:
        if when == "inside":
            comm._end.hub._do = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(tensor).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    # Found by the end of the process, not by an alarm.
    comm._end.hub.lookout = comm._lookout = None
    with naming_failure(comm, "killed", "the sum of the test"):
        comm.all_reduce(tensor).wait()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_killed_rank_is_named_at_once(ranks, when):
    first, second, third = ranks(3).outcomes(killed, when)
    assert second.status == "died"
    for outcome in (first, third):
        assert outcome.is_a(CommunicationError)
        assert "the sum of the test failed: rank 1 (process" in outcome.error
        assert "has ended" in outcome.error
    assert not list(SHM.glob("*rankstep*"))


def killed_in_training(me):
    torch.manual_seed(0)
    run = DistributedDataParallel(nn.Linear(20, 20), bucket_cap_mb=0.0001)
    for step in range(3):
        out = run(torch.ones(2, 20))
        if me.rank == 1 and step == 2:
            out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        out.sum().backward()


def test_a_rank_killed_in_backward_is_named_with_the_step(ranks):
    first, second = ranks(2).outcomes(killed_in_training)
    assert second.status == "died"
    assert first.is_a(CommunicationError)
    assert "the reduction of step 2" in first.error
    assert "rank 1 (process" in first.error


def stopped(me):
    comm = HostCommunicator()
    tensor = comm.allocate(1000, torch.float32, CPU).fill_(1.0)
    comm.all_reduce(tensor).wait()
    if me.rank == 1:
        pid = os.getpid()
        helper = os.fork()
        if helper == 0:
            time.sleep(2.0)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(helper, 0)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(lookout, "ALARM_S", 0.3)
        patch.setattr(lookout, "CONFIRM_S", 0.3)
        comm.all_reduce(tensor).wait()
    told = [str(w.message) for w in caught if w.category is StoppedRankWarning]
    return tensor[0].item(), told


def test_a_stopped_rank_is_told_and_waited_for(ranks):
    first, second = ranks(2).run(stopped)
    assert first[0] == second[0] == 4.0
    assert len(first[1]) == 1
    assert "waiting for rank 1 (process" in first[1][0]
    assert second[1] == []


def full(me):
    """Rank 1 may not make files as large as a bucket."""
    comm = HostCommunicator()
    comm.all_reduce(torch.ones(3)).wait()
    torch.manual_seed(0)
    run = DistributedDataParallel(nn.Linear(300, 300))
    if me.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    try:
        run(torch.ones(2, 300)).sum().backward()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_no_memory_to_share_is_told_on_every_rank(ranks):
    outcomes = ranks(2).outcomes(full)
    for outcome in outcomes:
        assert outcome.is_a(CommunicationError)
        assert "no 0.3 MiB of shared memory for gradients" in outcome.error
        assert "RANKSTEP_SHARED_MEMORY=0" in outcome.error
    assert "rank 1 (process" in outcomes[0].error


def different(me):
    comm = HostCommunicator(dist.new_group())
    comm.all_reduce(torch.ones(3)).wait()
    dtype = (torch.float32, torch.int64)[me.rank]
    with pytest.raises(RankSkewError) as told:
        comm.all_reduce(torch.ones(3 + me.rank, dtype=dtype)).wait()
    # What else is under way may no longer belong together: nothing is summed any more, and the reason is repeated.
    with pytest.raises(RankSkewError, match="different things at once"):
        comm.all_reduce(torch.ones(3)).wait()
    return str(told.value)


def test_different_wishes_are_told_on_every_rank(ranks):
    wishes = "rank 0 all-reduce of 3 elements of float32; rank 1 all-reduce of 4 elements of int64"
    for told in ranks(2).run(different):
        assert wishes in told


def interrupted(me):
    """Ctrl-C while waiting: this rank is out, and the other one hears of it."""
    comm = HostCommunicator()
    comm.all_reduce(torch.ones(3)).wait()
    if me.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            comm.all_reduce(torch.ones(3)).wait()
        finally:
            timer.join()
    time.sleep(1.0)
    comm.all_reduce(torch.ones(3)).wait()


def test_an_interrupted_wait_is_told(ranks):
    first, second = ranks(2).outcomes(interrupted)
    assert first.is_a(KeyboardInterrupt)
    assert second.is_a(RuntimeError)
    assert "rank 0 (process" in second.error
    assert "failed: KeyboardInterrupt" in second.error
