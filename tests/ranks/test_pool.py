"""The pool of living ranks: it runs, it tells what failed, it leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rankstep.errors import RankstepError, WorldError
from rankstep.testing import RankFailure, RankPool, Status


def sum_of_ranks(me, scale):
    tensor = torch.full((2,), float(me.rank * scale), device=me.device)
    dist.all_reduce(tensor)
    return tensor


def draws(me):
    return random.random(), float(np.random.rand()), torch.rand(2)  # noqa: NPY002


def tensors(me):
    grown = torch.arange(6.0).reshape(2, 3)
    return {
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "view": grown[:, 1],
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def pid(me):
    return os.getpid()


def echo(me, *args, **kwargs):
    return args, kwargs


def raise_on(me, rank, error):
    if me.rank == rank:
        raise error
    dist.barrier()


def raise_everywhere(me):
    time.sleep(0.2 * me.rank)
    raise WorldError(f"refused by {me.rank}")


def warn(me):
    warnings.warn("look out", UserWarning, stacklevel=1)


def set_environment(me):
    os.environ["RANKSTEP_LEFT"] = "1"
    del os.environ["RANK"]


def environment(me, *names):
    return [os.environ.get(name) for name in names]


def sleep(me, rank):
    if me.rank == rank:
        time.sleep(1000)


def die(me, rank):
    if me.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_all(me):
    dist.barrier()


def close_group(me):
    dist.destroy_process_group()


def open_group(me, *, close):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if close:
        dist.destroy_process_group()
    return int(total)


def return_local(me):
    return lambda: None


class Broken:
    def __del__(self):
        raise ValueError("from the depths")


def drop_broken(me):
    Broken()


def is_parent_of_its_workers(me):
    batches = iter(DataLoader(range(4), num_workers=1))
    next(batches)
    facts = Path(f"/proc/{batches._workers[0].pid}/stat").read_text(encoding="utf-8")
    batches._shutdown_workers()
    return int(facts.rpartition(")")[2].split()[1]) == os.getpid()


def test_a_killed_rank_takes_its_workers_with_it(ranks):
    # They look whether their parent is still there.
    assert ranks(2).run(is_parent_of_its_workers) == [True] * 2


def test_results_come_by_rank_and_the_group_is_open(ranks):
    first, second = ranks(2).run(sum_of_ranks, scale=3)
    assert torch.equal(first, torch.tensor([3.0, 3.0]))
    assert torch.equal(first, second)


def test_ranks_live_on_between_calls(ranks):
    before = ranks(2).run(pid)
    assert ranks(2).run(pid) == before
    assert os.getpid() not in before


def test_every_call_starts_from_the_same_seed_on_all_ranks(ranks):
    first, second = ranks(2).run(draws)
    again, _ = ranks(2).run(draws)
    for other in (second, again):
        assert first[:2] == other[:2]
        assert torch.equal(first[2], other[2])


def test_tensors_come_back_as_plain_copies(ranks):
    got, _ = ranks(2).run(tensors)
    assert got["half"].dtype == torch.bfloat16
    assert got["half"][0] == 1.5
    assert got["half"][1].isnan()
    assert got["view"].tolist() == [1.0, 4.0]
    assert got["view"].untyped_storage().nbytes() == 8
    assert got["scalar"].shape == ()
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["parameter"].requires_grad


def test_arguments_may_hold_tensors_and_functions_of_the_test_file(ranks):
    (args, kwargs), _ = ranks(2).run(echo, torch.ones(2), pid, name=WorldError)
    assert args[0].tolist() == [1.0, 1.0]
    assert args[1] is pid
    assert kwargs == {"name": WorldError}


def test_an_error_names_the_rank_the_message_and_the_place(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(raise_on, 1, ValueError("names the cause"))
    text = str(caught.value)
    assert "rank 1 raised: ValueError: names the cause" in text
    assert "in raise_on" in text
    assert "_rank_process.py" not in text.partition("rank 0")[0]
    # The other rank was left waiting, and shows where.
    assert "rank 0 hung" in text
    assert text.index("rank 1 raised") < text.index("rank 0 hung")


def test_after_a_failure_the_pool_works_again(ranks):
    before = ranks(2).run(pid)
    with pytest.raises(RankFailure):
        ranks(2).run(raise_everywhere)
    assert ranks(2).run(sum_of_ranks, scale=1)[0].tolist() == [1.0, 1.0]
    assert set(ranks(2).run(pid)).isdisjoint(before)


def test_the_first_error_in_time_stands_first(ranks):
    outcomes = ranks(2).outcomes(raise_everywhere, reusable=True)
    text = str(RankFailure(outcomes[::-1]))
    assert text.index("refused by 0") < text.index("refused by 1")


def test_outcomes_tell_what_was_raised_and_keep_the_pool_when_asked(ranks):
    before = ranks(2).run(pid)
    first, second = ranks(2).outcomes(raise_everywhere, reusable=True)
    assert (first.rank, second.rank) == (0, 1)
    assert second.status is Status.RAISED
    assert second.error_type == "WorldError"
    assert second.error == "refused by 1"
    assert second.is_a(RankstepError)
    assert second.is_a(RuntimeError)
    assert not second.is_a(ValueError)
    assert ranks(2).run(pid) == before


def test_a_warning_on_a_rank_fails_the_call(ranks):
    outcomes = ranks(2).outcomes(warn, reusable=True)
    assert [outcome.error for outcome in outcomes] == ["look out", "look out"]
    assert outcomes[0].is_a(UserWarning)


def test_an_error_that_nobody_caught_fails_the_call(ranks):
    outcome, _ = ranks(2).outcomes(drop_broken, reusable=True)
    assert "ValueError: from the depths" in outcome.error


def test_the_environment_is_torchruns_and_put_back_after_each_call(ranks):
    ranks(2).run(set_environment)
    _, second = ranks(2).run(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSTEP_LEFT")
    assert second == ["1", "2", "1", None]


def test_lambdas_are_refused_with_the_reason(ranks):
    with pytest.raises(TypeError, match="top level of a module"):
        ranks(2).run(lambda me: None)
    outcome, _ = ranks(2).outcomes(return_local, reusable=True)
    assert outcome.is_a(TypeError)
    assert "must be plain data" in outcome.error


def test_a_function_must_not_close_the_pools_group(ranks):
    outcome, _ = ranks(2).outcomes(close_group)
    assert "backend=None" in outcome.error


def test_functions_open_their_own_groups_again_and_again_without_a_backend():
    with RankPool(2, backend=None) as pool:
        assert pool.run(open_group, close=True) == [2, 2]
        assert pool.run(open_group, close=True) == [2, 2]
        outcome, _ = pool.outcomes(open_group, close=False)
        assert "left a process group open" in outcome.error


def test_a_hang_shows_where_every_rank_stands(ranks):
    first, second = ranks(2).outcomes(sleep, 1, timeout_s=1.0)
    assert first.status is Status.OK
    assert second.status is Status.HUNG
    assert "in sleep" in second.traceback
    assert "process state S" in second.error


def test_a_rank_killed_in_the_middle_of_a_call_is_reported(ranks):
    call = ranks(2).start(sleep, 1)
    ranks(2).kill(1, signal.SIGKILL)
    first, second = call.outcomes(timeout_s=20.0)
    assert first.status is Status.OK
    assert second.status is Status.DIED
    assert "SIGKILL" in second.error


def test_a_rank_that_dies_in_a_call_is_named_before_its_peers(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(die, 1)
    text = str(caught.value)
    assert "rank 1 died: its process ended by signal SIGKILL" in text
    assert text.index("rank 1") < text.index("rank 0")


def test_a_stopped_rank_is_told_from_a_waiting_one(ranks):
    pool = ranks(2)
    pool.run(wait_for_all)
    pool.kill(1, signal.SIGSTOP)
    first, second = pool.outcomes(wait_for_all, timeout_s=1.0)
    assert "in wait_for_all" in first.traceback
    assert "process state T (stopped)" in second.error


def test_variables_given_to_a_pool_reach_its_ranks():
    with RankPool(1, env={"RANKSTEP_GIVEN": "yes", "GROUP_RANK": None}) as pool:
        assert pool.run(environment, "RANKSTEP_GIVEN", "GROUP_RANK") == [["yes", None]]


def test_close_ends_the_processes_and_frees_the_port():
    pool = RankPool(2)
    fds = len(list(Path("/proc/self/fd").iterdir()))
    pids = pool.run(pid)
    assert pool.is_running
    pool.close()
    assert not pool.is_running
    assert not any(Path(f"/proc/{number}").exists() for number in pids)
    assert pool.port is None
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds


def test_at_most_two_shared_pools_live_on(ranks):
    pool = ranks(2)
    pool.run(pid)
    for other in (11, 2, 12):
        ranks(other)
    assert pool.is_running
    ranks(13)
    assert not pool.is_running
    assert ranks(2) is not pool


def test_ranks_end_with_a_test_run_that_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from rankstep.testing import RankPool

            def pid(me):
                return os.getpid()

            def wait(me):
                time.sleep(1000)

            if __name__ == "__main__":
                pool = RankPool(2)
                print(*pool.run(pid), flush=True)
                call = pool.start(wait)
                pool.kill(1, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        ),
        encoding="utf-8",
    )
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    pids = run.stdout.split()
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{number}").exists() for number in pids)
