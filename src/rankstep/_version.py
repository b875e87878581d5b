"""The version, read by the build and shown by ``rankstep --version``."""

__version__ = "0.1.0.dev0"
