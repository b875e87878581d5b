"""``rankstep run``: torchrun's command line, handed to our launcher."""

from __future__ import annotations

from torch.distributed.run import get_args_parser

from rankstep.launch.launch import launch

_USAGE = """\
rankstep run [flags] train.py [arguments of train.py]

example: four ranks on this machine
  rankstep run --nproc-per-node 4 train.py --epochs 3

example: two machines with four ranks each; the same line on both, with --node-rank 0 on the first and 1 on the second
  rankstep run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 4 train.py
"""


def main(words: list[str]) -> int:
    """Start the ranks and return the exit code.

    Args:
        words: torchrun's flags, the script, and the script's own arguments.
    """
    parser = get_args_parser()
    parser.prog, parser.usage = "rankstep run", _USAGE
    parser.description = (
        "Starts a training script on several processes. The flags are torchrun's, and PET_* variables set them too; on "
        "one machine no address or port is needed."
    )
    return launch(parser.parse_args(words))
