"""The story of data parallelism, told from a real run of the user's model or of a built-in one."""

from rankstep.explain.blame import JobError
from rankstep.explain.job import Job

__all__ = ["Job", "JobError"]
