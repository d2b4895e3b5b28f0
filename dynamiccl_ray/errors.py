"""Every exception that users meet.

DynamicclError
├── ConfigError      an experiment YAML, a data file or a command line is wrong (also a ValueError)
├── ChannelError     a shared-memory segment cannot be used
│   └── ChannelBusyError   ... yet: another runner has claimed it, or it is still being set up
└── RunError         a run cannot start or go on
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final


class DynamicclError(Exception):
    """Says what is wrong, the value, what is valid and what to do."""


class ConfigError(DynamicclError, ValueError):
    """The user's input is wrong."""


class ChannelError(DynamicclError):
    """A segment is not ours, or of another build."""


class ChannelBusyError(ChannelError):
    """A segment that another runner has claimed, or that is still being set up: worth another try."""


class RunError(DynamicclError):
    """A run cannot start or go on."""


MOST_CHARS: Final = 600


def short(text: str) -> str:
    """What somebody else has written, or a library says of it, so that it fits into a message, in a line, and moves no
    cursor."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.splitlines()))
    return line if len(line) <= MOST_CHARS else f"{line[:MOST_CHARS]}..."


def reason(error: BaseException) -> str:
    """What an exception says, or its name where it says nothing, as one of a file that ends too early."""
    return short(str(error)) or type(error).__name__


def nearest(word: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing where no name is near."""
    lower = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""


DAMAGED: Final = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    OSError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
)
"""What libraries raise when they read a file that is damaged, or that somebody else has made."""
