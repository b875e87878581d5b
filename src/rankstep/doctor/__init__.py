"""Who is missing, where it stands, and who waits for it: a guard on every rank, and ``rankstep doctor``.

The guard is on once a world is open or a model is wrapped. While steps go by it starts no collective and uses no store;
``guard.py`` tells how it works, ``verdict.py`` how it judges, and ``docs/faults.md`` shows what it says.
"""

from rankstep.doctor.hooks import current, install, on_wrap

__all__ = ["current", "install", "on_wrap"]
