"""How tensors travel between ranks: one protocol, and the ways that fulfil it.

Everything above this folder talks to a :class:`Communicator` and never to torch.distributed. ``c10d`` goes through
torch's process groups, ``shm`` through memory that the ranks of a host share; :func:`communicator_for` chooses.
``sendrecv`` is plain and slow, and serves as an oracle in tests.
"""

from rankstep.collectives.c10d import C10dCommunicator
from rankstep.collectives.communicator import Communicator, Pending
from rankstep.collectives.sendrecv import SendRecvCommunicator
from rankstep.collectives.shm import HostCommunicator, communicator_for

__all__ = [
    "C10dCommunicator",
    "Communicator",
    "HostCommunicator",
    "Pending",
    "SendRecvCommunicator",
    "communicator_for",
]
