"""A limit on the memory that a library may take while it reads a file that a stranger may have made."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

_STATM = Path("/proc/self/statm")
# The limit is the whole process's, so that two threads must not set it in turns.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Lets this process allocate at most about `more` bytes beyond what it has now; mapped files do not count.

    An allocation beyond that fails: in Python and pyarrow with a MemoryError.
    """
    with _one_at_a_time:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = int(_STATM.read_bytes().split()[5]) * resource.getpagesize() + more
        limits = [wanted, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
