"""`pipeline.train` with a tracker on rank 0 whose service takes longer to say goodbye than a launcher waits."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

from pipeline import command_line, observers, train
from pipeline.run_folder.attempts import read_attempts
from pipeline.training.observer import Observer
from pipeline.training.trainer import Trainer

SEEN = "seen_at_the_end"
SLOW_S = 4.0


class SlowTracker(Observer):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_end(self, *, finished: bool) -> None:
        ended = read_attempts(self.folder)[-1].ended
        time.sleep(SLOW_S)
        (self.folder / SEEN).write_text(f"{finished} {ended and ended.exit_code}")


make = observers.make_observers


def make_observers(trainer: Trainer) -> list[Observer]:
    slow = [SlowTracker(trainer.config.folder)] if trainer.rank == 0 else []
    return [*make(trainer), *slow]


if __name__ == "__main__":
    with patch.object(observers, "make_observers", make_observers):
        command_line.run_program(train.add_options, train.main, __doc__)
