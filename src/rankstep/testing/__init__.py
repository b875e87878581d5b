"""For testing code that runs on many ranks: living ranks, stand-ins for communication, assertions."""

from rankstep.testing._rank_process import Rank
from rankstep.testing.asserts import (
    assert_bitwise_equal,
    assert_close_to,
    assert_in_order,
    assert_same_on_all,
    first_difference,
)
from rankstep.testing.calls import Called, noted_collectives
from rankstep.testing.fakes import (
    Collective,
    DelayedCommunicator,
    FailingCommunicator,
    RecordingCommunicator,
)
from rankstep.testing.outcomes import Outcome, RankFailure, Status
from rankstep.testing.ranks import Call, RankPool, close_pools, get_pool

__all__ = [
    "Call",
    "Called",
    "Collective",
    "DelayedCommunicator",
    "FailingCommunicator",
    "Outcome",
    "Rank",
    "RankFailure",
    "RankPool",
    "RecordingCommunicator",
    "Status",
    "assert_bitwise_equal",
    "assert_close_to",
    "assert_in_order",
    "assert_same_on_all",
    "close_pools",
    "first_difference",
    "get_pool",
    "noted_collectives",
]
