"""What a kind of base gives to the core: whose code computes the base, and how.

Bases of the native families are one kind (`pipeline.model.native_bases`); extensions have others
(`Extension.base_kinds`). `pipeline.model.bases` says of which kind a base is. What depends on a
kind and needs no argument beside a spec, a folder or a decoder is a method of that class:
`DecoderSpec`, `BaseFolder`, `CausalDecoder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.config.base import BasePrecision
from pipeline.config.method import Initialisers, Method
from pipeline.config.run import RunConfig
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.families import HfTensor
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.quantized import Fp8Recipe, QuantizedPrecision
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan


class BaseKind(ABC):
    """A kind of base.

    Attributes:
        scale_export: where the function is that makes an export of the format `scale`, as
            `module:name`: it takes a `TrainedModel` and a dtype, and returns an `Export`. None: the
            core's.
    """

    scale_export: str | None = None

    @abstractmethod
    def takes(self, model_type: object) -> bool:
        """Whether bases of this `model_type` are of this kind where the run has no `base_code`.

        Kinds are asked in order, the native one first.
        """

    @abstractmethod
    def read_spec(self, path: Path) -> DecoderSpec:
        """The architecture that the folder's config.json describes; `path` may be that file.

        Raises:
            BaseModelError: the file is missing or damaged, or the architecture is not supported.
        """

    @abstractmethod
    def folder(self, path: Path, spec: DecoderSpec) -> BaseFolder:
        """The weights of the folder `path`, of which `spec` was read."""

    @abstractmethod
    def build_decoder(
        self, spec: DecoderSpec, plan: ExpansionPlan, tp: TensorParallel
    ) -> CausalDecoder:
        """The base of this architecture, widened by `plan`; its values are unset.

        Raises:
            LayoutError: the base cannot be split over `tp.size` ranks.
        """

    @abstractmethod
    def load_base(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        """Fills the base of `model` with the folder's weights.

        Raises:
            BaseModelError: a weight is missing, or does not fit config.json.
        """

    @abstractmethod
    def initial_expansion(
        self,
        model: CausalDecoder,
        base: BaseFolder,
        names: set[str],
        initialisers: Initialisers,
        seed: int,
    ) -> Iterator[tuple[str, Tensor]]:
        """The initial value in fp32 of each parameter of `names`, which a method adds to the base.

        `model` gives the structure only (it may be on the meta device). The base is checked when
        this is called, before the first value is computed.

        Raises:
            BaseModelError: a weight of the base is missing, or does not fit config.json.
        """

    @abstractmethod
    def quantize_maps(
        self, model: CausalDecoder, precision: QuantizedPrecision, recipe: Fp8Recipe
    ) -> None:
        """Stores the base's linear maps, unset yet, in `precision`; in fp8 as `recipe` says.

        Raises:
            ConfigError: one of them trains, or cannot be split over the ranks in `precision`.
        """

    @abstractmethod
    def base_alone(self, model: CausalDecoder) -> nn.Module:
        """The base's own modules without what a method added, on the meta device as `model`."""

    @abstractmethod
    def idle_parameters(self, spec: DecoderSpec, base: nn.Module) -> int:
        """How many parameters of `base_alone` are of experts that a token does not take."""

    @abstractmethod
    def adapted_tensor(self, path: str, spec: DecoderSpec) -> HfTensor:
        """The weights in transformers' model that the adapter at `path` of our model changes."""

    def check_run(self, config: RunConfig, spec: DecoderSpec, tp_size: int) -> None:
        """Checks that a run, its method included, has only settings that the base can have.

        Raises:
            ConfigError: it has others.
        """
        self.check_method(config.method, spec)

    def check_method(self, method: Method, spec: DecoderSpec) -> None:  # noqa: B027  # no limits
        """Checks that the method has only settings that the base can have.

        Raises:
            ConfigError: it has others.
        """

    def dtype_unsupported_reason(self, spec: DecoderSpec, dtype: torch.dtype) -> str | None:
        """Why the base does not run in this type, as a clause about the base; None: it does."""
        return None

    def missing_kernels(self, spec: DecoderSpec) -> str | None:
        """Which packages would speed the base up and are not installed, as a line; None: none."""
        return None

    def dry_run_rows(
        self, spec: DecoderSpec, base_precision: BasePrecision
    ) -> Iterable[tuple[str, str]]:
        """What the dry run says of the base beside its parameters: labels and texts."""
        return ()

    def first_config_comment(self, spec: DecoderSpec) -> str | None:
        """How the base is computed, as a comment in a first configuration, before its widths."""
        return None

    def traced(self, spec: DecoderSpec) -> AbstractContextManager[None]:
        """Within it, the base's code runs on the meta device.

        Raises:
            NotTracedError: within, if that code fails all the same (`pipeline.sizing`).
        """
        return nullcontext()
