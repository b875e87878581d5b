"""Parts of the launcher by themselves: whose processes are found, what stands on a screen, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankstep.launch import screen as screen_module
from rankstep.launch.keeper import living
from rankstep.launch.output import Output
from rankstep.launch.screen import Screen

MARK = b"RANKSTEP_TEST_MARK=1"


@pytest.fixture(params=[True, False], ids=["marked", "unmarked"])
def leader(request):
    """A living process that leads a session, with the mark or without."""
    name, value = MARK.decode().split("=")
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=os.environ | ({name: value} if request.param else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    yield process.pid, request.param
    process.communicate(b"\n")


def test_a_number_that_a_stranger_has_by_now_is_left_alone(leader):
    pid, marked = leader
    nobody = 1 << 30
    assert (pid in living({pid}, nobody, MARK)) is marked
    assert pid in living({pid}, os.getpid(), MARK)
    assert pid not in living(set(), nobody, MARK)


def screen_on_pipes(monkeypatch, *, terminal=False):
    reads, writes = zip(os.pipe(), os.pipe(), strict=True)
    monkeypatch.setattr(screen_module, "_fds", lambda: writes)
    screen = Screen()
    for device in screen._devices.values():
        device.terminal = terminal
    screen.expect(1, "stdout")

    def shown():
        for fd in writes:
            os.close(fd)
        texts = [os.read(fd, 1000) for fd in reads]
        for fd in reads:
            os.close(fd)
        return texts

    return screen, shown


@pytest.mark.parametrize(
    ("terminal", "expected"),
    [
        (True, b"\r 10%\r\x1b[K[rank 1] hello\n 10%\r 20%\n[rank 1] bye\n"),
        (False, b"\r 10%\n[rank 1] hello\n\r 20%\n[rank 1] bye\n"),
    ],
)
def test_lines_of_others_beside_a_progress_line(monkeypatch, terminal, expected):
    screen, shown = screen_on_pipes(monkeypatch, terminal=terminal)
    screen.pass_on("stdout", b"\r 10%")
    screen.add(1, "stdout", b"hello")
    screen.pass_on("stdout", b"\r 20%\n")
    screen.add(1, "stdout", b"bye")
    assert shown() == [expected, b""]


def test_a_screen_that_nobody_reads_stops_nothing(monkeypatch):
    reads, writes = zip(os.pipe(), os.pipe(), strict=True)
    monkeypatch.setattr(screen_module, "_fds", lambda: writes)
    screen = Screen()
    os.close(reads[0])
    screen.pass_on("stdout", b"lost\n")
    screen.pass_on("stderr", b"seen\n")
    assert os.read(reads[1], 100) == b"seen\n"
    for fd in (*writes, reads[1]):
        os.close(fd)


def test_a_full_disk_stops_no_rank(capfd, tmp_path):
    output = Output(tmp_path)
    path = output.pipe(1, "stdout", 0, shown=True, file=Path("/dev/full"))
    with Path(path).open("wb", buffering=0) as pipe:
        pipe.write(b"first\nsecond\n")
    output.close()
    Path(path).unlink()
    shown, errors = capfd.readouterr()
    assert shown == "[rank 1] first\n[rank 1] second\n"
    assert errors.startswith("rankstep: rank 1: its stdout is not kept any longer: ")
    assert output.tail(1) == ["first", "second"]
