"""The disk tier: a directory that several engines on one machine may share.

The directory is the index. Each value is a file, named after its key; looking a key up asks the file system, and
which values were used last is what the files' own times say. So there is nothing in memory to rebuild after a restart,
nothing to keep alike in several processes, and nothing goes wrong when files are deleted from outside.

Only how much there is needs more than the directory: a small file, the *ledger*, has the bytes and the number of
values of each part of it. A process locks it for the moments in which files begin to exist or cease to, which is what
holds the cap over all processes (`kvplug.store.l2.disk.space`). Reads never lock anything.
"""

from kvplug.store.l2.disk.settings import DiskSettings
from kvplug.store.l2.disk.tier import DiskTier

__all__ = ["DiskSettings", "DiskTier"]
