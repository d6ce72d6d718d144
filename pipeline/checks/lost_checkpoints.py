"""A run that was saved, and has no checkpoint left, is not begun again at step 0 in silence."""

from __future__ import annotations

from pipeline.config.run import RunConfig
from pipeline.errors import CheckpointError
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import read_attempts
from pipeline.run_folder.checkpoint_names import named_checkpoint
from pipeline.run_folder.metrics import METRICS
from pipeline.run_folder.status import TRAINING_FILE, is_trained


def check_no_checkpoint_is_lost(config: RunConfig) -> None:
    """Checks that a run that was saved still has a checkpoint; otherwise it would begin at step 0.

    Damaged checkpoints are reported where a run resumes.

    Raises:
        CheckpointError: The run's records say that it was saved, and no checkpoint is left.
    """
    folder = config.folder
    checkpoints = config.checkpoint_folder
    if any(checkpoints.glob("step_*")) or named_checkpoint(checkpoints) is not None:
        return
    kept: list[str] = []
    for name in (TRAINING_FILE, METRICS):
        if (folder / name).exists():
            kept.append(name)
    saved = 0
    for attempt in read_attempts(folder):
        saved = max(saved, attempt.newest_checkpoint_step)
    if is_trained(folder):
        found = f"{folder / TRAINING_FILE} says that the run is trained"
    elif kept and saved:
        found = f"{folder / ATTEMPTS} says that the run was saved at step {saved}"
    else:
        return
    raise CheckpointError(
        f"{checkpoints}: holds no checkpoint, but {found}; put the checkpoints back, or, to train "
        f"from step 0, move {' and '.join(kept)} away or name another `folder` in the configuration"
    )
