"""The world of ranks: who this process is, the process group, and decisions that all ranks share."""

from rankstep._callable import make_callable
from rankstep.world.agree import agree, rank_zero_first
from rankstep.world.env import RankEnv, read_rank_env
from rankstep.world.world import World, world

__all__ = ["RankEnv", "World", "agree", "rank_zero_first", "read_rank_env", "world"]

make_callable(__name__, world)
