"""What is measured and logged: the sections `metrics`, `profile` and `observers`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section


class Metrics(Section):
    """Peak performance for MFU, and the interval of progress lines (docs/metrics.md)."""

    peak_tflops: PositiveFloat | None = None
    """dense peak of one device, of which MFU is a share; default: NVIDIA's 16-bit figure for known
    GPUs, else no MFU"""
    log_every_s: PositiveFloat = 10.0
    """fewest seconds between progress lines"""


class Profile(Section):
    """Steps that torch.profiler traces into `<folder>/profile`; other steps are unaffected."""

    steps: tuple[PositiveInt, PositiveInt] | None = None
    """first and last traced step, counted from 1; default: none"""
    ranks: list[NonNegativeInt] = [0]
    """ranks that write a trace"""

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Profile:
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ValueError(
                f"steps: the last, {self.steps[1]}, is before the first, {self.steps[0]}"
            )
        return self


class WandbTracker(Section):
    """Weights & Biases. Needs `pip install 'scale-cpt[wandb]'`."""

    project: str
    """its name in Weights & Biases"""
    entity: str | None = None
    """owner of the project; default: the logged-in user"""
    mode: Literal["online", "offline"] = "online"
    """offline writes to `<folder>/wandb`, for a later `wandb sync`"""


class MlflowTracker(Section):
    """MLflow. Needs `pip install 'scale-cpt[mlflow]'`."""

    tracking_uri: str
    """server or database: `http://host:5000`, `sqlite:///runs/mlflow.db`"""
    experiment: str = "scale-cpt"
    """its name in MLflow, created if it does not exist"""


class TrackerSettings(Section):
    """Experiment trackers, which also get the figures of every step (docs/metrics.md)."""

    wandb: WandbTracker | None = None
    """Weights & Biases; default: off"""
    mlflow: MlflowTracker | None = None
    """MLflow; default: off"""
