"""A wait that is taken up again and again: what the work itself says counts, and not that one look at it took too long."""

from __future__ import annotations

import pytest

from rankstep.collectives.lookout import WatchedWork


class Work:
    """One that ends between the time-out of a look and the question whether it has ended."""

    def __init__(self, failure=None, looks=0):
        self.failure = failure
        self.looks = looks

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self):
        self.looks -= 1
        return self.looks < 0


class Lookout:
    def __init__(self):
        self.heard = self.through = 0

    def hear(self):
        self.heard += 1

    def came_through(self):
        self.through += 1


@pytest.mark.parametrize("looks", [0, 2])
def test_a_work_that_ends_behind_the_time_out_of_a_look_has_not_failed(looks):
    lookout = Lookout()
    assert WatchedWork(Work(looks=looks), lookout).wait() is True
    assert (lookout.heard, lookout.through) == (looks, 1)


def test_a_work_that_failed_says_so_itself():
    lookout = Lookout()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        WatchedWork(Work("Connection closed by peer"), lookout).wait()
    assert lookout.through == 0
