"""Every error that Rankstep raises.

An error names the rank, the thing (parameter, bucket, variable, file), the cause and the next step. The classes also
derive from the built-in type that torch raises in the same place, so that code written for torch's wrapper catches them.
"""

from __future__ import annotations


class RankstepError(Exception):
    """The root of all errors raised by Rankstep."""


class WorldError(RankstepError, RuntimeError):
    """The variables that describe the world are missing, contradict each other or are out of range."""


class DataError(RankstepError, ValueError):
    """A dataset, batch size or sampler argument cannot be dealt to the ranks as asked."""


class LaunchError(RankstepError, RuntimeError):
    """The launcher could not start the ranks: a missing script, a taken port, a wrong flag."""


class ModelError(RankstepError, RuntimeError):
    """A module cannot be trained by this wrapper: nothing to train, lazy parameters, an unknown option."""


class ModelTypeError(ModelError, ValueError):
    """A module or an argument that torch's wrapper refuses with ValueError."""


class ModelMismatchError(ModelError):
    """The ranks hold different models; names the first difference and shows both sides."""


class SyncError(RankstepError, RuntimeError):
    """The ranks disagree about a step, so its gradient would not be the global one."""


class RankSkewError(SyncError):
    """One rank skipped, repeated or reordered a step."""


class AbandonedBackwardError(SyncError):
    """A backward died on another rank; the sums of that step lack its part."""


class LateGradientError(SyncError):
    """A gradient arrived after its bucket had left, where it cannot be added in time."""


class CommunicationError(SyncError):
    """A collective failed: a peer is gone, unreachable or did not take part in time."""


class DriftError(SyncError):
    """The ranks' weights or buffers are no longer the same."""


class NonFiniteGradientWarning(UserWarning):
    """A rank's gradient was NaN or infinite; names the rank and the parameter."""


class SkippedBatchWarning(UserWarning):
    """A rank has drawn more batches for a step than the others; it has probably left one out."""


class SharedMemoryWarning(UserWarning):
    """Ranks of one host cannot share memory, so their gradients go through sockets; says why."""


class StoppedRankWarning(UserWarning):
    """This rank waits for a process that a signal has stopped; it goes on when that one does."""


class CountError(RankstepError, ValueError):
    """A count of samples or tokens that no gradient can be divided by."""


class StaticGraphError(SyncError):
    """static_graph=True was promised, and another set of parameters was used."""


class ShardedGradientError(RankstepError, RuntimeError):
    """A gradient that is dealt to the ranks was to be read or changed as if it were whole; says how to get the whole one."""


class CheckpointError(RankstepError, RuntimeError):
    """A checkpoint cannot be written, or is damaged, foreign or of a newer format; says which, where and why."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, and an older one taken; says which and why."""


class DoctorError(RankstepError, RuntimeError):
    """A job cannot be asked where its ranks are: there is none, it does not answer, or it has left nothing."""
