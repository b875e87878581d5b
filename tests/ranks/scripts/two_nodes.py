"""Write this rank's place, and what a sum over all ranks gave, into a folder; one file per rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from rankstep.world import rank_zero_first, world

with world() as here:
    total = torch.tensor([float(here.rank + 1)])
    dist.all_reduce(total)
    with rank_zero_first(local=True), Path(sys.argv[1], f"node{here.node}").open("a") as file:
        file.write(f"{here.local_rank}\n")
    place = {
        name: getattr(here, name)
        for name in ("node", "local_rank", "rank", "world_size", "local_world_size", "node_count")
    }
    Path(sys.argv[1], f"{here.rank}.json").write_text(json.dumps(place | {"sum": total.item()}))
