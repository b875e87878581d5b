"""Use everything that a world offers on this rank, and write what came out into a folder, one file per rank."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed as dist

from rankstep.errors import DataError, WorldError
from rankstep.world import agree, rank_zero_first, world

LISTEN = "0A"


def listening():
    """Return the hexadecimal addresses on which this process listens."""
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        # The folder's own descriptor is gone by the time it is read.
        with suppress(OSError):
            links.add(str(fd.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in links:
                found.add(fields[1].partition(":")[0])
    return sorted(found)


def main(folder):
    facts = {}
    with world() as here:
        names = "rank local_rank world_size local_world_size node node_count backend is_main"
        facts |= {name: getattr(here, name) for name in names.split()}
        facts["device"] = str(here.device)
        facts["repr"] = repr(here)
        total = torch.tensor([float(here.rank + 1)])
        dist.all_reduce(total, group=here.process_group)
        facts["sum"] = total.item()
        facts["threads"] = torch.get_num_threads()
        facts["listening"] = listening()

        last = here.rank == here.world_size - 1
        facts["agree"] = [agree(last), agree(last, "all"), agree(True, "all"), agree(False)]

        order = Path(folder, "order")
        for turn in range(3):
            with rank_zero_first(local=turn == 2):
                if here.rank == 0:
                    time.sleep(0.1)
                with order.open("a") as file:
                    file.write(f"{turn} {here.rank}\n")
        try:
            with rank_zero_first():
                {}["lost"]
        except (KeyError, WorldError) as error:
            facts["first failed"] = f"{type(error).__name__}: {error}"

        with world() as inner:
            facts["inner"] = inner.rank
        facts["open after inner"] = dist.is_initialized()
        facts["share"] = here.local_batch(4 * here.world_size)
        try:
            facts["uneven"] = here.local_batch(4 * here.world_size + 1)
        except DataError as error:
            facts["uneven"] = str(error)
        here.print(f"printed by rank {here.rank}")
    facts["open after"] = dist.is_initialized()
    with world() as again:
        facts["again"] = agree(again.rank == 0)
    Path(folder, f"{facts['rank']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
