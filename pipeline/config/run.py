"""The run configuration: one YAML file per run, checked as a whole before anything starts.

Unknown keys are refused, and all faults are reported together with their dotted paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import BaseCode, BasePrecision, Fp8Settings, VocabularySettings
from pipeline.config.changed_steps import with_fitting_steps
from pipeline.config.checkpoints import CheckpointSettings
from pipeline.config.data import Data, Role
from pipeline.config.gate import GateSettings
from pipeline.config.health import Preflight, WatchdogSettings
from pipeline.config.method import FullFineTuning, Lora, Method, ScaleMethod
from pipeline.config.observers import Metrics, Profile, TrackerSettings
from pipeline.config.parallel import Parallel
from pipeline.config.reading import Section, checked
from pipeline.config.schedule import Schedule
from pipeline.config.sources import CHECKPOINTS, COMMAND_LINE, read_settings
from pipeline.config.stability import Forgetting, Stability
from pipeline.config.stages import Stage, check_stages
from pipeline.config.validation import ValidationSettings
from pipeline.errors import BaseModelError
from pipeline.hub import model_folder

HubModels = Literal["whole", "described", "named"]
"""How models on the hub are fetched: with their weights (whole), without them (described), or not
at all (named)."""


class RunConfig(Section):
    """All settings of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """letters, digits, dots, dashes and underscores"""
    folder: Path
    """run folder, for everything that the run writes"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """seed of the data order and of random initial blocks"""
    base: Path
    """Hugging Face folder with safetensors, GGUF file, or model on the hub (`org/name@revision`)"""
    base_code: BaseCode | None = None
    """whose code computes the base: this package's (native), or that of transformers for any
    model_type, with fewer settings (docs/architectures.md); default: native where there is a
    family"""
    base_precision: BasePrecision = "bf16"
    """how frozen linear maps are stored: as the DeepSpeed file says (bf16), in 8 bits, or in 4
    (docs/sizing.md)"""
    fp8: Fp8Settings = Fp8Settings()
    """how a base in fp8 is stored and multiplied (docs/sizing.md)"""
    vocabulary: VocabularySettings | None = None
    """extended tokenizer in place of the base's; default: the base's own"""
    init_expansion: Path | None = None
    """exported expansion to start from; default: a new one"""
    method: Method
    """which parameters train, and how they start"""
    data: Data
    """corpora, their proportions, and their packing"""
    schedule: Schedule
    """steps, batch and learning rate"""
    stages: list[Stage] = []
    """stages of the training, in their order; default: a single stage in which everything trains
    (docs/stages.md)"""
    gate: GateSettings | None = None
    """gate that is fitted after training; default: none"""
    parallel: Parallel = Parallel()
    """layout of the ranks"""
    validation: ValidationSettings = ValidationSettings()
    """held-out perplexity during the run"""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """when checkpoints are saved, and which are kept"""
    stability: Stability = Stability()
    """how bad steps are handled"""
    forgetting: Forgetting = Forgetting()
    """how much the model may forget of the base's own domain"""
    preflight: Preflight = Preflight()
    """checks before the first step"""
    watchdog: WatchdogSettings = WatchdogSettings()
    """when a run with lost or hung ranks is ended"""
    metrics: Metrics = Metrics()
    """peak performance for MFU, and progress lines"""
    profile: Profile = Profile()
    """steps that the profiler traces"""
    observers: TrackerSettings = TrackerSettings()
    """experiment trackers"""
    deepspeed: Path
    """file of ds_configs/, for ZeRO and precision only"""
    activation_checkpointing: Literal["none", "collaborative", "all"] = "none"
    """layers whose activations are recomputed in the backward pass: none, those in which the base
    stream may depend on trained weights (collaborative), or all"""
    recomputation_keeps: Literal["nothing", "attention", "products"] = "nothing"
    """what recomputed layers keep: results of attention kernels, or also the products of gate and
    up maps (docs/sizing.md)"""
    deterministic: bool = False
    """deterministic kernels on GPUs, where there are any; slower (docs/checkpoints.md)"""
    compile: bool = False
    """torch.compile of each layer, not with ZeRO-3: 9 to 14 % less time a step on an H100"""
    flash_attention: Literal["auto", "torch", "fa4"] = "auto"
    """attention on GPUs: torch's kernels, FlashAttention 4 (fa4, with pip install
    'scale-cpt[flash]'), or that where it is installed and fits (auto; docs/gpu.md)"""

    @model_validator(mode="after")
    def _stages_fit(self) -> RunConfig:
        if self.stages:
            check_stages(self.stages, self.schedule, self.data)
        return self

    @model_validator(mode="after")
    def _gate_fits(self) -> RunConfig:
        if self.gate is None:
            return self
        if isinstance(self.method, FullFineTuning):
            # No blocks to close: the gate chooses between the base and the trained model.
            self._check_gate_of_difference(self.gate)
        elif not isinstance(self.method, (ScaleMethod, Lora)):
            # Freeze and LLaMA Pro: see docs/combinations.md for what a gate there would need.
            raise ValueError(
                f"gate: method {self.method.name} adds no blocks that it could close; remove it"
            )
        for name in self.gate.negatives:
            if name not in self.data.corpora or self.data.corpora[name].role == "new":
                raise ValueError(
                    f"gate.negatives: {name} is no corpus of role self_generated or replay"
                )
        if not self.gate_negatives:
            raise ValueError(
                "gate: needs text that is not new; add a corpus of role self_generated or replay"
            )
        return self

    def _check_gate_of_difference(self, gate: GateSettings) -> None:
        """Checks the gate of full fine-tuning, whose export is the base and a difference.

        Raises:
            ValueError: a setting does not fit.
        """
        if gate.layer == 0:
            raise ValueError(
                "gate.layer: expected at least 1 with method fft, found 0: before layer 0 the "
                "stream holds the token alone"
            )
        if self.vocabulary is not None:
            raise ValueError(
                "gate: method fft has none with an extended vocabulary, as the base has no rows "
                "for its new tokens; remove gate or vocabulary"
            )

    @model_validator(mode="after")
    def _gated_settings_have_a_gate(self) -> RunConfig:
        settings = self.method.gated_settings
        if self.gate is None and settings is not None:
            raise ValueError(
                f"method.{settings}: only tokens that a gate opens read them; without a gate the "
                "base's outputs would change: add a section gate, or remove them"
            )
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> RunConfig:
        method = self.method
        limits = self.forgetting
        if self.init_expansion is not None and not isinstance(method, ScaleMethod):
            raise ValueError(f"init_expansion: method {method.name} trains no expansion; remove it")
        # These two train the base's own weights: there are no base's logits to compare with.
        if limits.max_kl_from_base is not None and not method.keeps_base:
            raise ValueError(
                f"forgetting.max_kl_from_base: method {method.name} keeps no base; set max_increase"
            )
        # Forgetting is measured on held-out text of role replay only. Without any, a limit would
        # never apply, and nothing would say so.
        has_replay = self._has_heldout_of_role("replay")
        has_probe = self.validation.probe is not None or has_replay
        lacks_replay = limits.max_increase is not None and not has_replay
        lacks_probe = limits.max_kl_from_base is not None and not has_probe
        if lacks_replay or lacks_probe:
            raise ValueError(
                "forgetting: needs a corpus of role replay with a held-out part, or, for "
                "max_kl_from_base, validation.probe"
            )
        return self

    def _has_heldout_of_role(self, role: Role) -> bool:
        """Whether a corpus of the role has a held-out part."""
        for name, corpus in self.data.corpora.items():
            if corpus.role == role and self._has_heldout(name):
                return True
        return False

    @model_validator(mode="after")
    def _validation_has_text(self) -> RunConfig:
        probe = self.validation.probe
        if probe is not None:
            if probe not in self.data.corpora or not self._has_heldout(probe):
                raise ValueError(
                    f"validation.probe: {probe} is no corpus with a held-out part; set "
                    "heldout_input or heldout_fraction of one"
                )
            if not self.method.keeps_base:
                raise ValueError(
                    f"validation.probe: method {self.method.name} keeps no base to compare with; "
                    "remove it"
                )
        if self.validation.stop_after is not None and self.stages:
            raise ValueError(
                "validation.stop_after: not possible with `stages`, as a stage that gains nothing "
                "may come before one that does; remove one of the two"
            )
        if self.validation.stop_after is not None and not self._has_heldout_of_role("new"):
            raise ValueError(
                "validation.stop_after: needs a corpus of role new with a held-out part; set its "
                "heldout_input or heldout_fraction"
            )
        return self

    def _has_heldout(self, name: str) -> bool:
        corpus = self.data.corpora[name]
        return bool(corpus.heldout_input or corpus.heldout_fraction)

    @property
    def gate_negatives(self) -> list[str]:
        """The names of the corpora on whose text a gate learns to stay closed."""
        by_role: dict[Role, list[str]] = {"new": [], "replay": [], "self_generated": []}
        for name, corpus in self.data.corpora.items():
            by_role[corpus.role].append(name)
        if self.gate is not None and self.gate.negatives:
            return self.gate.negatives
        # Self-generated text is preferred: it needs no old training data, and covers all that the
        # base writes.
        return by_role["self_generated"] or by_role["replay"]

    @property
    def trains(self) -> list[str]:
        """The entries `trains` of all stages, each once; empty if a stage trains everything."""
        trained: list[str] = []
        for stage in self.stages:
            if not stage.trains:
                return []
            trained += stage.trains
        # A dict removes repeated entries, and keeps their order.
        return list(dict.fromkeys(trained))

    @property
    def tokenizer(self) -> Path:
        """Where the run's tokenizer lies: the base's own, or the extended one."""
        if self.vocabulary is None:
            return self.base
        return self.vocabulary.folder

    @property
    def checkpoint_folder(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.folder / CHECKPOINTS

    @property
    def initial_expansion_folder(self) -> Path:
        """Where the initial expansion lies."""
        return self.init_expansion or self.folder / "initial_expansion"


def parse_config(values: Mapping[str, Any], *, source: str) -> RunConfig:
    """The configuration in `values`.

    Args:
        values: the settings.
        source: their origin, which errors name.

    Raises:
        ConfigError: the values do not describe a run; its one line has all faults.
    """
    return checked(RunConfig, values, source=source, listed_in="docs/configuration.md")


def load_config(path: Path, changes: Sequence[str] = (), *, base: HubModels = "whole") -> RunConfig:
    """The run that a YAML file describes.

    Args:
        path: the YAML file, or the run's folder. Relative paths in it count from the working
            directory.
        changes: settings that replace those of the file, such as `schedule.steps=20`.
        base: how models that the file names on the hub are fetched.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not describe a run; or a change is of
            no setting.
    """
    source = str(path)
    for change in changes:
        source += f" {COMMAND_LINE} {change}"
    settings = read_settings(path, changes)
    if changes:
        settings = with_fitting_steps(read_settings(path), settings)
    config = parse_config(settings, source=source)
    if base == "named":
        return config

    folders: dict[str, Any] = {"base": _local_folder(config.base, weights=base == "whole")}
    if config.vocabulary is not None:
        folder = _local_folder(config.vocabulary.folder, weights=False)
        folders["vocabulary"] = config.vocabulary.model_copy(update={"folder": folder})
    return config.model_copy(update=folders)


def _local_folder(named: Path, *, weights: bool) -> Path:
    """The folder of a model on this machine; a model on the hub is fetched.

    Where that fails, the name stays: the checks of a run open it, and report the failure together
    with other faults.
    """
    try:
        return model_folder(named, weights=weights)
    except BaseModelError:
        return named
