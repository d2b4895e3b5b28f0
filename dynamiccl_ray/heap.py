"""Memory that this process has freed."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Gives whole free pages back to the system; takes some milliseconds.

    glibc keeps what was freed below or between blocks that are in use. A process that lives for days beside threads
    of Ray's, and takes tens of MiB for a moment in every round, would keep ever more of it. Does nothing where the C
    library is another.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
