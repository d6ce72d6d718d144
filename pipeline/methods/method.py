"""The interface of a training method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from pipeline.expansion_folder import ExpansionFolder
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import ActivationCheckpointing, CausalDecoder
from pipeline.model.from_hf import load_new_tokens
from pipeline.model.new_tokens import holds_new_tokens
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import TensorParallel


class TrainingMethod(ABC):
    """Builds the model that a run trains from a base."""

    def build(
        self,
        spec: DecoderSpec,
        tp: TensorParallel,
        activation_checkpointing: ActivationCheckpointing,
    ) -> CausalDecoder:
        """The model with this rank's shards, uninitialised.

        `requires_grad` is set where parameters train. The rows of new tokens train with every
        method.

        Raises:
            UserError: the settings do not fit the base, or the model cannot be split over the
                ranks.
        """
        model = self._build(spec, tp)
        # Set here for all methods: recomputing activations changes memory and time, but no result.
        model.activation_checkpointing = activation_checkpointing
        for name, parameter in model.named_parameters():
            # Also where the base is frozen: new rows start as averages of others, and are yet to be
            # learned.
            if holds_new_tokens(name):
                parameter.requires_grad_(True)
        return model

    def load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        """Sets every parameter to its value before the first step."""
        self._load(model, base, tp)
        # After the base, from whose rows the new ones may be computed.
        load_new_tokens(model, base, tp, self.expansion)

    @abstractmethod
    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> CausalDecoder:
        """The model with the method's own `requires_grad`; `build` sets the rest."""

    @abstractmethod
    def _load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        """Sets every parameter but the rows of new tokens."""

    @property
    def expansion(self) -> ExpansionFolder | None:
        """The initial expansion, for methods that have one.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return None

    @property
    def parameter_bound(self) -> str | None:
        """Why there may be fewer parameters than the model on the meta device has; None: there are
        as many."""
        return None

    def dry_run_rows(self, spec: DecoderSpec) -> Iterable[tuple[str, str]]:
        """What the dry run says of the parts that the method adds: labels and texts."""
        return ()

    def base_name(self, name: str, spec: DecoderSpec) -> str:
        """The base's name of the model's parameter `name`; `spec` is the base's architecture."""
        return name
