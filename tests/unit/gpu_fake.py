"""A GPU that is none: streams, events and a link with known delays, behind the few names of torch.cuda that are used.

The host's clock only goes on when a test says so. The device has a clock of its own. What is queued runs in order, each
stream for itself. Nothing here can be waited for: a recorder that synchronises finds no function for it.
"""

from __future__ import annotations

import contextlib

import torch
from trace_samples import MS

from rankstep.testing import RecordingCommunicator


class Stream:
    """When the last thing that was queued ends, in nanoseconds of the host's clock."""

    def __init__(self):
        self.ends_ns = 0


class Gpu:
    """The module, the machine, and the host's clock.

    Args:
        skew_ms: The device's clock shows so much more than the host's.
        drift: The device's clock is faster by this part.
    """

    def __init__(self, skew_ms=0, drift=0.0):
        self.now = 1000 * MS
        self.main = Stream()
        self.current = self.main
        self.capturing = False
        self.broken = False
        self.made = 0
        self._skew_ns, self._drift = skew_ms * MS, drift

    def clock(self):
        """Stands for time.perf_counter_ns."""
        return self.now

    def seconds(self):
        """Stands for time.perf_counter; looking takes a microsecond."""
        self.now += 1000
        return self.now / 1e9

    def host_ms(self, ms):
        """The host is busy with something else."""
        self.now += round(ms * MS)

    def run(self, ms):
        """Queue work on the current stream; that takes the host 0.01 ms."""
        self.now += MS // 100
        self.current.ends_ns = max(self.current.ends_ns, self.now) + round(ms * MS)

    def shown(self, at_ns):
        """What the device's clock shows."""
        return at_ns * (1 + self._drift) + self._skew_ns

    # what torch.cuda has

    def current_stream(self, device):
        assert device == torch.device("cuda", 0)
        return self.current

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, *, enable_timing):  # noqa: N802 - torch's name
        assert enable_timing
        self.made += 1
        return Event(self)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Event:
    """A mark in a stream; one that was read may be put anew."""

    def __init__(self, gpu):
        self._gpu, self.at_ns = gpu, None

    def record(self, stream):
        if self._gpu.broken:
            raise RuntimeError("the device is gone")
        self.at_ns = stream.ends_ns = max(stream.ends_ns, self._gpu.now)

    def query(self):
        return self.at_ns is not None and self._gpu.now >= self.at_ns

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        apart = (self._gpu.shown(other.at_ns) - self._gpu.shown(self.at_ns)) / MS
        return float(torch.tensor(apart, dtype=torch.float32))


class SlowLink(RecordingCommunicator):
    """Every all-reduce takes the same time on a stream of its own, one after the other, and no host waits for it."""

    def __init__(self, gpu, takes_ms):
        super().__init__(1, host_waits=False)
        self._gpu, self._takes_ns, self._stream = gpu, takes_ms * MS, Stream()

    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        gpu, link = self._gpu, self._stream
        link.ends_ns = end = max(link.ends_ns, gpu.current.ends_ns, gpu.now) + self._takes_ns

        class Pending:
            def wait(self):
                gpu.current.ends_ns = max(gpu.current.ends_ns, end)

            def get_future(self):
                return self

            def add_done_callback(self, call):
                """As torch does: at once, on a stream that waits for the result."""
                after = Stream()
                after.ends_ns = end
                with gpu.on(after):
                    call(self)

        return Pending()
