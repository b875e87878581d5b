"""How tensors travel between ranks: one protocol, and the ways that fulfil it.

Everything above this folder talks to a :class:`Communicator` and never to torch.distributed. ``c10d`` is the one that
trains; ``sendrecv`` is plain and slow, and serves as an oracle in tests.
"""

from rankstep.collectives.c10d import C10dCommunicator
from rankstep.collectives.communicator import Communicator, Pending
from rankstep.collectives.sendrecv import SendRecvCommunicator

__all__ = ["C10dCommunicator", "Communicator", "Pending", "SendRecvCommunicator"]
