"""The fault table with the launcher: the exit code, what stands on the screen, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankstep.cli.main import main
from rankstep.launch import logs
from two_hosts import two_hosts

SCRIPT = Path(__file__).parent / "scripts" / "training.py"
RANKSTEP = Path(sys.executable).parent / "rankstep"
LIMIT = 90
SHM = Path("/dev/shm")  # noqa: S108 - looked at only


class Job:
    """One `rankstep run` of the script, in a folder of its own for what it leaves."""

    def __init__(self, folder, how, *flags, ranks=2, prefix=(), alarm_s=1.0, **env):
        self.folder = folder
        self.segments = set(SHM.glob("*rankstep*"))
        words = [*prefix, RANKSTEP, "run", f"--nproc-per-node={ranks}", *flags, SCRIPT, how, folder]
        self.process = subprocess.Popen(
            [str(word) for word in words],
            env=os.environ
            | {
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                "RANKSTEP_GUARD_ALARM": str(alarm_s),
            }
            | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, *names):
        """Wait until these processes have said who they are; return their numbers."""
        until = time.monotonic() + LIMIT
        paths = [self.folder / f"{name}.pid" for name in names]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < until, self.finish()
            assert self.process.poll() is None, self.finish()
            time.sleep(0.05)
        return [int(path.read_text()) for path in paths]

    def finish(self):
        """Wait for its end; return the exit code and the screen, and see that nothing is left."""
        try:
            output, _ = self.process.communicate(timeout=LIMIT)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
        left = [path.name for path in self.folder.iterdir() if path.suffix != ".pid"]
        assert set(left) <= {"checkpoints", "logs"}, left
        assert set(SHM.glob("*rankstep*")) <= self.segments
        for path in self.folder.glob("*.pid"):
            assert not Path("/proc", path.read_text()).exists() or self.is_other(path)
        return self.process.returncode, output

    @staticmethod
    def is_other(path):
        """Whether the number is another process's by now."""
        command = Path("/proc", path.read_text(), "cmdline")
        return not command.exists() or SCRIPT.name not in command.read_text()


PREFIX = re.compile(r"\[ranks? ([\d, -]+?)(?: x\d+)?\] ")


def verdicts(output, ranks):
    """The guard's lines, by rank; the launcher shows equal lines of several ranks as one.

    On a busy host a rank may come late, and be told so: that is left out.
    """
    said = {rank: [] for rank in range(ranks)}
    for line in output.splitlines():
        speakers, text = [0], line
        if found := PREFIX.match(line):
            text = line[found.end() :]
            parts = [part.partition("-") for part in found[1].replace(" ", "").split(",")]
            speakers = [
                rank
                for first, _, last in parts
                for rank in range(int(first), int(last or first) + 1)
            ]
        if text.startswith("rankstep: ") and not re.search(
            "failed first|later|traceback|did not arrive", text
        ):
            for rank in speakers:
                said[rank].append(text)
    return said


@pytest.mark.parametrize(
    ("how", "code", "words", "last"),
    [
        (
            "raise",
            1,
            "rank 1 failed: ValueError: cannot use batch 3 (",
            # With its exit code, unless another rank was gone before this one had ended.
            "ValueError: cannot use batch 3",
        ),
        (
            "kill",
            137,
            "rank 1 did not come: its process was killed by signal 9 (SIGKILL), by hand or because",
            "killed by signal 9 (SIGKILL); if nobody",
        ),
        (
            "hidden",
            1,
            "rank 1 has stood elsewhere",
            "in evaluate: `torch.distributed.barrier()`",
        ),
    ],
    ids=["1 an exception", "5 kill -9", "11 a hidden collective"],
)
def test_a_job_ends_with_the_cause_on_every_rank(how, code, words, last, tmp_path):
    returned, output = Job(tmp_path, how, ranks=3).finish()
    assert returned == code, output
    said = verdicts(output, 3)
    survivors = (0, 2) if how == "kill" else (0, 1, 2)
    for rank in survivors:
        assert words in said[rank][0], output
        assert said[rank][0] == said[0][0]
    final = output.splitlines()[-1]
    assert final.startswith("rankstep: rank ")
    assert last in final
    if how != "hidden":
        assert final.startswith("rankstep: rank 1 failed first (pid ")


def test_the_others_have_a_moment_for_their_last_words(monkeypatch):
    """torch looks for the first error file right before it ends all other ranks."""
    slept = []
    monkeypatch.setattr(logs.time, "sleep", slept.append)
    files = logs._ErrorFiles({0: "first", 1: "second"})
    assert slept == []
    assert (files[1], files[0], files[1]) == ("second", "first", "second")
    assert slept == [logs._LAST_WORDS_S]


def test_ctrl_c_is_no_fault(tmp_path):
    """19: once is enough, and nobody is called missing."""
    job = Job(tmp_path, "endless")
    job.wait_for("rank0", "rank1")
    job.process.send_signal(signal.SIGINT)
    code, output = job.finish()
    assert code == 130, output
    assert verdicts(output, 2) == {0: ["rankstep: stopped by SIGINT"], 1: []}


def test_sigterm_saves_at_the_next_step(tmp_path):
    """20: preempted; all ranks save after the same step and end."""
    pytest.importorskip("safetensors")
    job = Job(tmp_path, "preempted")
    job.wait_for("rank0", "rank1")
    job.process.send_signal(signal.SIGTERM)
    code, output = job.finish()
    assert code == 143, output
    assert verdicts(output, 2) == {0: ["rankstep: stopped by SIGTERM"], 1: []}
    assert "through" not in output
    assert list((tmp_path / "checkpoints").iterdir())


def test_the_doctor_asks_a_running_job_and_reads_what_a_dead_one_left(tmp_path, capsys):
    job = Job(tmp_path, "sleep", "--log-dir", tmp_path / "logs", alarm_s=60.0)
    (pid,) = job.wait_for("late")
    try:
        for name in ([str(job.process.pid)], [str(pid)]):
            assert main(["doctor", *name]) == 0
            told = capsys.readouterr().out
            assert "rank 1 has not come" in told
            assert "in spoil: `time.sleep(60.0)`" in told
        assert main(["doctor", str(pid), "--json"]) == 0
        reports = json.loads(capsys.readouterr().out)["ranks"]
        assert [report["standing"] for report in reports] == ["waiting", "working"]
        assert reports[1]["step"] == 3
        assert main(["doctor"]) == 0
        assert "in spoil: `time.sleep(60.0)`" in capsys.readouterr().out
    finally:
        os.kill(pid, signal.SIGUSR1)
        code, output = job.finish()
    assert code == 1, output
    assert main(["doctor", str(tmp_path / "logs")]) == 0
    told = capsys.readouterr().out
    assert "rank 1 failed: ValueError: woken by signal 10 (" in told
    assert "Traceback (most recent call last):" in told
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_two_jobs_do_not_collide(tmp_path):
    """21: without a port each finds its own; one that is given and taken is named, with its owner."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    jobs = [Job(folder, "nothing") for folder in folders]
    for code, output in [job.finish() for job in jobs]:
        assert code == 0, output
        assert output.count("is through") == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = Job(folders[0], "nothing", f"--master-port={port}").finish()
    assert code == 2
    assert f"port {port} is taken by process {os.getpid()} (" in output


@pytest.fixture
def cable():
    """Two hosts, and how to cut the cable between them."""
    with two_hosts("10.78.0") as hosts_and_cut:
        yield hosts_and_cut


@pytest.mark.netns
def test_a_host_that_is_cut_off_is_told_on_both_sides(cable, tmp_path):
    """15."""
    prefixes, cut = cable
    flags = ["--nnodes=2", "--master-addr=10.78.0.1", "--master-port=29501"]
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    jobs = [
        Job(
            folder,
            "endless",
            *flags,
            f"--node-rank={node}",
            ranks=1,
            prefix=prefix,
            RANKSTEP_HOST=f"host {node}",
            RANKSTEP_GUARD_LIMIT="4",
        )
        for node, (prefix, folder) in enumerate(zip(prefixes, folders, strict=True))
    ]
    try:
        for node, job in enumerate(jobs):
            job.wait_for(f"rank{node}")
        assert cut().returncode == 0
        (first_code, first), (second_code, second) = [job.finish() for job in jobs]
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
    assert first_code != 0
    assert second_code != 0
    assert "cause: rank 1 has not come: nothing is heard from host" in first, first
    assert "the ranks' store does not answer" in second, second
    for output in (first, second):
        assert "every rank that waits raises an error now" in output
