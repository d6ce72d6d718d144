"""Work that training does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """One piece of work at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`; what was begun before must be finished."""

        def guarded() -> None:
            try:
                work()
            except BaseException as fault:  # noqa: BLE001  it is raised where it can be heard
                self._fault = fault

        # A daemon: a run that fails elsewhere must not wait for a thread that waits for another rank.
        self._thread = threading.Thread(target=guarded, name="checkpoint writer", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the work, and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
