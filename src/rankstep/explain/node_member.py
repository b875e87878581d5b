"""What a rank of the second world runs: it says where it stands, and hears from all others where they stand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rankstep.collectives import C10dCommunicator
from rankstep.explain.measure.peers import Peers
from rankstep.world import world


def main(folder: Path) -> None:
    """Write this rank's place, and what it heard, to ``rank-N.json``.

    Args:
        folder: Private to this run; `rankstep.explain.nodes.two_nodes` has made it.
    """
    with world(device="cpu") as here:
        peers = Peers(C10dCommunicator(), here.device)
        place: dict[str, Any] = {
            "node": here.node,
            "local_rank": here.local_rank,
            "rank": here.rank,
            "world_size": here.world_size,
            "launcher": os.getppid(),
        }
        heard = peers.table([here.node, here.local_rank, here.rank])
        place["heard"] = [[int(number) for number in row] for row in heard]
        part = folder / f"rank-{here.rank}.part"
        part.write_text(json.dumps(place), encoding="utf-8")
        part.replace(folder / f"rank-{here.rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
