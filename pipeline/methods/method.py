"""The interface of a training method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import TensorParallel

ActivationCheckpointing = Literal["none", "collaborative", "all"]


class TrainingMethod(ABC):
    """How a base becomes the model that a run trains."""

    @abstractmethod
    def build(
        self, spec: DecoderSpec, tp: TensorParallel, activation_checkpointing: ActivationCheckpointing
    ) -> Decoder:
        """The model with this rank's shards, its values not yet set; `requires_grad` says what trains."""

    @abstractmethod
    def load(self, model: Decoder, base: BaseFolder, tp: TensorParallel) -> None:
        """Sets every parameter to its value before the first step, at which the model's logits equal the base's."""
