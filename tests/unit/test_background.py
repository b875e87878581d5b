"""Threads beside the training thread have ended before the interpreter does."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref

from rankstep.world import background

PROGRAM = """
import atexit, threading, torch
from rankstep.world import background

ending = threading.Event()
atexit.register(lambda: print("registered before:", thread.is_alive()))

def work():
    while not ending.is_set():
        torch.mm(torch.ones(60, 60), torch.ones(60, 60))

thread = background.begin("worker", work, (), ending.set)
atexit.register(lambda: print("registered after:", thread.is_alive()))
"""


def run(program):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_thread_inside_torch_does_not_abort_the_end_of_the_process():
    done = run(PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "registered after: True\nregistered before: False\n"


def test_a_stuck_thread_holds_the_end_up_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(background, "LIMIT_S", 0.05)
    stuck, asked = threading.Event(), []
    thread = background.begin("stuck", stuck.wait, (), lambda: asked.append(time.monotonic()))
    background.end_all()
    assert len(asked) == 1
    assert thread.is_alive()
    stuck.set()
    thread.join(10)
    background.end_all()
    assert len(asked) == 1


def test_what_a_thread_used_is_free_when_it_has_ended():
    class Owner:
        def __init__(self):
            self.ending = threading.Event()
            self.thread = background.begin("owned", self.work, (), self.end)

        def end(self):
            self.ending.set()

        def work(self):
            self.ending.wait(10)

    owner = Owner()
    gone = weakref.ref(owner)
    owner.end()
    owner.thread.join(10)
    del owner
    gc.collect()
    assert gone() is None
