"""How much of the communication was hidden behind the backward: arithmetic on one rank's times."""

from __future__ import annotations

from typing import Any


def overlap(rank: dict[str, Any]) -> dict[str, Any]:
    """Split the time that buckets were in flight into a part that was hidden and one that was not.

    In flight is the time during which at least one bucket had been launched and had not come back. What of it lies before
    the last gradient was ready is hidden: the rank was computing gradients anyway. The rest is exposed.

    Args:
        rank: What one rank recorded of its backward.
    """
    flights = union([(b["launched"], b["finished"]) for b in rank["buckets"]])
    ready = max((event["at"] for event in rank["ready"]), default=rank["backward"][1])
    in_flight = sum(end - begin for begin, end in flights)
    hidden = sum(max(0.0, min(end, ready) - begin) for begin, end in flights)
    return {
        "last_ready": ready,
        "in_flight": in_flight,
        "hidden": hidden,
        "exposed": in_flight - hidden,
        "hidden_share": hidden / in_flight if in_flight else 0.0,
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same stretch of time as spans that do not overlap, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
