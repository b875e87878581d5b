"""When ranks fail, hang or are stopped: the cause is last on the screen, the code is right, and nobody is left."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import distributed as dist

from rankstep.cli.main import main
from rankstep.launch.plan import LaunchPlan
from rankstep.launch.report import Failure, exit_code, read_failures, write_report

SCRIPT = Path(__file__).parent / "scripts" / "rank.py"
RANKSTEP = Path(sys.executable).parent / "rankstep"
LIMIT = 90


class Launcher:
    """One `rankstep run` of the script above, with a folder for what it leaves."""

    def __init__(self, folder, how, *flags, stdout=None):
        self.folder = folder
        command = [RANKSTEP, "run", "--nproc-per-node", "2", *flags, SCRIPT, how, folder]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
        )

    def finish(self):
        """Wait for its end; return standard output and standard error."""
        try:
            output, errors = self.process.communicate(timeout=LIMIT)
            return (output or b"").decode(), errors.decode()
        finally:
            self.process.kill()
            self.process.wait()

    def pids(self, count):
        """Wait until so many processes have said who they are."""
        end = time.monotonic() + LIMIT
        while len(found := list(self.folder.glob("*.pid"))) < count:
            assert time.monotonic() < end, self.finish()
            time.sleep(0.05)
        return [int(path.read_text()) for path in found]

    def left_files(self):
        return [path.name for path in self.folder.iterdir() if path.suffix != ".pid"]


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"


def children(pid):
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def wait_until_gone(pids, seconds):
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return left
        time.sleep(0.02)
    return []


@pytest.mark.parametrize(
    ("how", "code", "last", "before"),
    [
        ("raise", 1, "ValueError: cannot use batch 7 (exit code 1)", "second line"),
        ("exit", 3, "SystemExit: 3 (exit code 3)", "rank 1 begins"),
        ("vanish", 5, "exited with code 5", "rank 1 begins"),
        ("kill", 137, "killed by signal 9 (SIGKILL); if nobody", "rank 1 begins"),
    ],
)
def test_the_rank_that_failed_first_is_last_on_the_screen(how, code, last, before, tmp_path):
    launcher = Launcher(tmp_path, how)
    pids = launcher.pids(1) if how != "raise" else []
    _, errors = launcher.finish()
    lines = errors.splitlines()
    assert launcher.process.returncode == code, errors
    assert lines[-1].startswith("rankstep: rank 1 failed first (pid ")
    assert last in lines[-1]
    assert lines[-2] == before
    if how == "raise":
        traceback = lines[lines.index("rankstep: traceback of rank 1:") + 1 :]
        assert traceback[0] == "Traceback (most recent call last):"
        assert "    raise ValueError(message)" in traceback
        assert not any("bootstrap" in line or "runpy" in line for line in traceback)
    assert wait_until_gone(pids, 1) == []
    assert launcher.left_files() == []


def test_a_script_that_meets_a_missing_file_runs_once(tmp_path):
    output, errors = Launcher(tmp_path, "missing").finish()
    assert output.count("rank 1 begins") == 1
    assert "FileNotFoundError" in errors.splitlines()[-1]


def test_the_rank_that_raised_comes_before_those_that_lost_it(tmp_path):
    launcher = Launcher(tmp_path, "closes")
    _, errors = launcher.finish()
    last = errors.splitlines()[-1]
    assert last.startswith("rankstep: rank 1 failed first (pid ")
    assert "ValueError: cannot use batch 8" in last
    assert launcher.process.returncode == 1


def test_ctrl_c_stops_stubborn_ranks_within_five_seconds(tmp_path):
    launcher = Launcher(tmp_path, "stubborn")
    pids = launcher.pids(4)
    launcher.process.send_signal(signal.SIGINT)
    assert wait_until_gone(pids, 5) == []
    _, errors = launcher.finish()
    assert launcher.process.returncode == 130
    assert errors.splitlines()[-1] == "rankstep: stopped by SIGINT"
    assert launcher.left_files() == []


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    launcher = Launcher(tmp_path, "stubborn", "--shutdown-timeout", "60")
    pids = launcher.pids(4)
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert [pid for pid in pids if not alive(pid)] == []
    launcher.process.send_signal(signal.SIGINT)
    assert wait_until_gone(pids, 5) == []
    launcher.finish()
    assert launcher.process.returncode == 130


def test_sigterm_is_passed_on(tmp_path):
    launcher = Launcher(tmp_path, "hang")
    pids = launcher.pids(2)
    launcher.process.send_signal(signal.SIGTERM)
    assert wait_until_gone(pids, 10) == []
    _, errors = launcher.finish()
    assert launcher.process.returncode == 143
    assert errors.splitlines()[-1] == "rankstep: stopped by SIGTERM"


def test_ctrl_c_while_waiting_for_the_other_node(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        launcher = Launcher(
            tmp_path, "hang", "--nnodes=2", "--node-rank=1", f"--master-port={port}"
        )
        silent.settimeout(LIMIT)
        connection, _ = silent.accept()
        with connection:
            launcher.process.send_signal(signal.SIGINT)
            _, errors = launcher.finish()
    assert launcher.process.returncode == 130
    assert errors.splitlines()[-1] == "rankstep: stopped by SIGINT"


def test_nothing_outlives_a_killed_launcher(tmp_path):
    # The ranks' own processes as well, which ignore what they may, and the launcher's private folder.
    launcher = Launcher(tmp_path, "stubborn")
    pids = launcher.pids(4)
    (folder,) = launcher.left_files()
    assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
    launcher.process.kill()
    assert wait_until_gone(pids, 5) == []
    launcher.finish()
    end = time.monotonic() + 10
    while launcher.left_files() and time.monotonic() < end:
        time.sleep(0.02)
    assert launcher.left_files() == []


def test_loading_workers_do_not_outlive_a_killed_launcher(tmp_path):
    launcher = Launcher(tmp_path, "loads")
    pids = launcher.pids(6)
    launcher.process.kill()
    assert wait_until_gone(pids, 3) == []
    launcher.finish()
    # Nor do the sockets over which they send tensors.
    end = time.monotonic() + 10
    while launcher.left_files() and time.monotonic() < end:
        time.sleep(0.02)
    assert launcher.left_files() == []


def test_the_ranks_die_with_the_launcher_even_without_its_keeper(tmp_path):
    launcher = Launcher(tmp_path, "hang")
    pids = launcher.pids(2)
    (keeper,) = [
        pid
        for pid in children(launcher.process.pid)
        if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in (keeper, launcher.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pids, 5) == []
    launcher.finish()


def test_no_line_is_lost_and_each_carries_its_rank(tmp_path):
    launcher = Launcher(tmp_path, "write")
    output, errors = launcher.finish()
    assert launcher.process.returncode == 0, errors
    lines = output.splitlines()
    plain = [line for line in lines if not line.startswith("[rank 1] ")]
    prefixed = [line.removeprefix("[rank 1] ") for line in lines if line.startswith("[rank 1] ")]
    for rank, own in enumerate((plain, prefixed)):
        assert own == [f"rank {rank} begins", *(f"line {n} of rank {rank}" for n in range(5000))]
    # Rank 0's progress bar is left as it is; of another rank's, the last state is shown.
    assert "bar 1\rbar 2\rbar 3\n" in errors
    assert "[rank 1] bar 3\n" in errors
    assert "no end of rank 0" in errors
    assert "[rank 1] no end of rank 1\n" in errors
    assert launcher.left_files() == []


def test_all_is_kept_in_files_with_log_dir(tmp_path):
    logs = tmp_path / "logs"
    launcher = Launcher(tmp_path, "write", "--log-dir", logs, "--local-ranks-filter", "1")
    output, errors = launcher.finish()
    assert launcher.process.returncode == 0, errors
    (run,) = logs.iterdir()
    assert run.stat().st_mode & 0o777 == 0o700
    for rank in range(2):
        folder = run / "attempt_0" / str(rank)
        kept = (folder / "stdout.log").read_text().splitlines()
        assert kept == [
            f"rank {rank} begins",
            *(f"line {n} of rank {rank}" for n in range(5000)),
        ]
        errors = (folder / "stderr.log").read_bytes().decode()
        assert errors == f"bar 1\rbar 2\rbar 3\nno end of rank {rank}"
        assert (folder / "stderr.log").stat().st_mode & 0o777 == 0o600
    assert "line 7 of rank 1" in output
    assert "line 7 of rank 0" not in output


def test_equal_lines_of_ranks_are_shown_once(tmp_path):
    launcher = Launcher(tmp_path, "say", "--nproc-per-node", "4")
    output, errors = launcher.finish()
    assert launcher.process.returncode == 0, errors
    told = [line for line in output.splitlines() if "begins" not in line]
    assert told.count("all say this") == 1
    # However late a rank comes, each is counted once.
    others = [line.partition("] ")[0] for line in told if line.endswith("] all say this")]
    assert sum(int(head.rpartition("x")[2]) if "x" in head else 1 for head in others) == 3
    assert {line for line in told if "only" in line} == {
        "only 0 says this",
        *(f"[rank {rank}] only {rank} says this" for rank in (1, 2, 3)),
    }


def read_screen(screen, until=None):
    """Read a terminal until a text has come, or to its end."""
    shown = ""
    while until is None or until not in shown:
        try:
            data = os.read(screen, 10_000)
        except OSError:
            break
        if not data:
            break
        shown += data.decode()
    return shown


def test_other_ranks_do_not_cut_the_progress_line(tmp_path):
    screen, terminal = pty.openpty()
    launcher = Launcher(tmp_path, "progress", stdout=terminal)
    os.close(terminal)
    shown = read_screen(screen, "a line\r\nstep 1 of 2")
    (tmp_path / "seen.pid").write_text("")
    shown += read_screen(screen)
    os.close(screen)
    _, errors = launcher.finish()
    assert launcher.process.returncode == 0, errors
    # The bar is cleared, the line written, the bar drawn again; and so until it ends.
    assert shown.count("\r\x1b[K[rank 1] a line\r\nstep 1 of 2\rstep 2 of 2\r\n") == 1


def test_rank_0_keeps_the_terminal(tmp_path):
    screen, terminal = pty.openpty()
    launcher = Launcher(tmp_path, "terminal", stdout=terminal)
    os.close(terminal)
    _, errors = launcher.finish()
    shown = os.read(screen, 10_000).decode()
    os.close(screen)
    assert launcher.process.returncode == 0, errors
    assert "rank 0 has a terminal: True" in shown
    assert "[rank 1] rank 1 has a terminal: False" in shown


def test_a_restart_is_announced_and_succeeds(tmp_path):
    launcher = Launcher(tmp_path, "restart", "--max-restarts", "1")
    output, errors = launcher.finish()
    assert launcher.process.returncode == 0, errors
    assert "rankstep: restart 1 of 1" in errors.splitlines()
    assert output.count("[rank 1] rank 1 begins") == 2


def test_a_restart_forgets_what_the_last_ranks_stored():
    # Otherwise the new ranks would connect to the addresses of the old ones.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = ("run/agent", "init/", "default_pg/0")
    for key in keys:
        store.set(key, "x")
    for nodes, kept in ((2, keys), (1, keys[:2])):
        config = SimpleNamespace(max_nodes=nodes, run_id="run")
        LaunchPlan(config, "python", [], {}, store).forget_ranks()
        assert sorted(store.list_keys()) == sorted(kept)


@pytest.mark.parametrize("flags", [["--master-port={}"], ["--rdzv-endpoint=127.0.0.1:{}"]])
def test_a_taken_port_is_named_before_a_rank_starts(flags, capfd, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [flag.format(port) for flag in flags]
        assert main(["run", "--nproc-per-node=2", *words, str(SCRIPT), "hang", str(tmp_path)]) == 2
    output, errors = capfd.readouterr()
    assert f"port {port} is taken by process {os.getpid()} (" in errors
    assert "begins" not in output


def failure(rank, code, moment, message=""):
    details = {"message": message, "extraInfo": {"py_callstack": "", "monotonic_ns": moment}}
    return SimpleNamespace(
        pid=100 + rank,
        exitcode=code,
        error_file_data={"message": details if message else "<NONE>"},
    )


def test_the_first_failure_is_found_below_the_second():
    # Rank 2 was killed; ranks 0 and 1 noticed; rank 3 was stopped by the launcher.
    error = SimpleNamespace(
        failures={
            0: failure(0, 1, 30, "ConnectionError: reset"),
            1: failure(1, -15, 20, "ConnectionError: closed"),
            2: failure(2, -9, None),
            3: failure(3, -15, None),
        }
    )
    failures = read_failures(error, {102: 10, 103: 40}.get)
    assert [one.rank for one in failures] == [2, 1, 0, 3]
    assert exit_code(failures[0]) == 137
    # A rank that had raised and was stopped while it left ended by its exception.
    assert exit_code(failures[1]) == 1
    report = write_report(failures, ["last words"]).splitlines()
    assert report[1:-1] == [
        "rankstep: rank 1 failed later: ConnectionError: closed",
        "rankstep: rank 0 failed later: ConnectionError: reset (exit code 1)",
        "rankstep: last lines of rank 2:",
        "last words",
    ]
    assert report[-1].startswith("rankstep: rank 2 failed first")


def test_many_failures_are_counted():
    failures = [Failure(rank, rank, 1, "OSError: x", "", rank) for rank in range(12)]
    report = write_report(failures, [])
    assert "3 more ranks failed later" in report
    assert "rank 11 failed later" not in report
