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
        """Sets every parameter to its value before the first step."""

    def check_files(self, share: slice) -> None:  # noqa: B027  # most methods have none
        """Raises UserError where a file that the method starts from, except the base's, has changed.

        Reads a `share` of these files, in a fixed order.
        """

    def starts_at_base(self) -> bool:
        """Whether the model's logits equal the base's before the first step."""
        return True

    def base_name(self, name: str, spec: DecoderSpec) -> str:
        """The name in the base, of architecture `spec`, of the model's base parameter `name`."""
        return name
