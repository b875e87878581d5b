"""Rankstep: train one PyTorch model on many processes as if they were one."""

from rankstep._version import __version__

__all__ = ["__version__"]
