"""The run configuration: one YAML file per run, checked as a whole before anything starts.

Unknown keys are refused, and all faults are reported together with their dotted paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.data import CorpusName, Data, Role
from pipeline.config.method import Freeze, FullFineTuning, Method, ScaleMethod
from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section, checked
from pipeline.config.schedule import Schedule
from pipeline.config.sources import CHECKPOINTS, COMMAND_LINE, read_settings
from pipeline.errors import BaseModelError
from pipeline.hub import model_folder

BasePrecision = Literal["bf16", "fp8", "nf4"]
GateFeatures = Literal["token", "token+running_mean"]
HubModels = Literal["whole", "described", "named"]
"""Of models that a configuration names on the hub: fetch them whole, or without weights, or not at all."""


class GateSettings(Section):
    """A gate fitted after training: per token it decides whether the text is new (docs/gate.md). Method scale only."""

    features: GateFeatures = "token+running_mean"
    """of the base's residual stream: each token's own, or also their decaying mean over the document so far"""
    layer: NonNegativeInt | None = None
    """the stream before this layer is read; default: the last place where it is exactly the base's, after the last
    layer for preserve and route, before l_fp for adapt"""
    negatives: list[CorpusName] = []
    """corpora of text that is not new; default: those of role self_generated, or else those of role replay"""
    tokens: PositiveInt = 100_000
    """of new text and of text that is not, each: so many to fit the gate, and as many others to set its threshold"""
    splices: bool = False
    """also fit on windows that begin in one kind of text and end in the other"""
    max_open_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """at most this share of the tokens that are not new may open: sets the threshold"""


class VocabularySettings(Section):
    """A tokenizer extended by scale-cpt vocabulary; new tokens get rows of their own (docs/vocabulary.md)."""

    folder: Path
    """what the tool wrote"""
    initial: Literal["mean", "last-weighted", "zero"] = "mean"
    """new rows start as the mean of the rows of the tokens that they replace, equally or with weights 1, 2, 3, …"""


class Metrics(Section):
    """Peak performance for MFU, and the interval of progress lines (docs/metrics.md)."""

    peak_tflops: PositiveFloat | None = None
    """of one device, dense, in the precision of the run: the reference of MFU; default: NVIDIA's figure for 16 bits if
    the GPU is known. Without either there is no MFU"""
    log_every_s: PositiveFloat = 10.0
    """minimum seconds between two progress lines in a log"""


class Profile(Section):
    """Steps that torch.profiler traces into `<folder>/profile`; other steps are unaffected."""

    steps: tuple[PositiveInt, PositiveInt] | None = None
    """the first and the last, counted from 1; default: none"""
    ranks: list[NonNegativeInt] = [0]
    """ranks that write a trace, one file each"""

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
    """the project of the run"""
    entity: str | None = None
    """user or team; default: the logged-in user's"""
    mode: Literal["online", "offline"] = "online"
    """offline: into `<folder>/wandb`, for `wandb sync`; needs no network"""


class MlflowTracker(Section):
    """MLflow. Needs `pip install 'scale-cpt[mlflow]'`."""

    tracking_uri: str
    """a server, or a database: `http://host:5000`, `sqlite:///runs/mlflow.db`"""
    experiment: str = "scale-cpt"
    """the experiment of the run; created if it does not exist"""


class TrackerSettings(Section):
    """Experiment trackers, which also get the figures of every step (docs/metrics.md)."""

    wandb: WandbTracker | None = None
    """Weights & Biases; default: off"""
    mlflow: MlflowTracker | None = None
    """MLflow; default: off"""


class Preflight(Section):
    """Checks of the allocation before the first step; they take seconds."""

    enabled: bool = True
    """false: no checks"""
    min_gb_per_s: Annotated[float, Field(ge=0)] | None = None
    """limit for the slowest all-reduce, as sent by a rank; default: 0.5 on GPUs, 0.001 on CPUs"""
    slow_factor: Annotated[float, Field(gt=1)] | None = None
    """how many times as long as the others' a rank's matrix product may take; default: no limit, the log names the
    slowest rank"""


class Stability(Section):
    """The handling of bad steps, and when a run is ended as diverged (docs/stability.md)."""

    max_skipped_steps: NonNegativeInt = 20
    """over the whole run: steps with NaN or infinity, and steps skipped after a rollback"""
    loss_increase: PositiveFloat | None = 1.0
    """a spike: this many nats per token above the running median; null: never"""
    gradient_norm_factor: Annotated[float, Field(gt=1)] | None = 10.0
    """or this many times its running median, and clipped; null: never"""
    window: Annotated[int, Field(ge=2)] = 128
    """steps of the running median; there is no spike before as many steps"""
    spike_steps: PositiveInt = 3
    """in a row, after which the run rolls back to the last checkpoint before them and skips them"""
    max_rollbacks: NonNegativeInt = 3
    """over the whole run, before it ends as diverged"""

    @property
    def rollback_steps(self) -> int:
        """How far behind the newest checkpoint one must lie that a spike right after it can go back to."""
        finds_spikes = self.loss_increase is not None or self.gradient_norm_factor is not None
        return self.spike_steps if finds_spikes and self.max_rollbacks > 0 else 0


class Forgetting(Section):
    """How much of the base's own domain, the corpora of role replay, may be lost; checked at each validation."""

    max_increase: PositiveFloat | None = None
    """of held-out perplexity over step 0's, as a fraction"""
    max_kl_from_base: PositiveFloat | None = None
    """nats per token, on the first held-out batch of role replay"""
    action: Literal["warn", "stop", "lower_learning_rate"] = "warn"
    """beyond either limit: log a warning, save and end, or multiply the learning rate for the rest of the run"""
    learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """factor of lower_learning_rate, each time"""


class Watchdog(Section):
    """When a run with lost or hung ranks ends, to be restarted."""

    beat_every_s: PositiveFloat = 5.0
    """interval of each rank's heartbeats; longer with more than 500 ranks"""
    dead_after_s: PositiveFloat = 60.0
    """a rank without a heartbeat for this long is lost; the end of a process is noticed immediately"""
    hung_after_s: PositiveFloat = 600.0
    """a run hangs if every rank is longer than this in a phase of a step (data, forward, backward, step)"""
    slow_after_s: PositiveFloat = 1800.0
    """the same for the start, validation and saving"""


class Parallel(Section):
    """The layout of the ranks; the data-parallel size is the world size divided by tp_size."""

    tp_size: PositiveInt = 1
    """ranks that share each layer; best within a node"""
    sequence_parallel: bool = False
    """between shared layers a rank holds its share of each sequence only: less memory"""


class Validation(Section):
    """Held-out perplexity during the run, for each corpus with a held-out part."""

    every_steps: PositiveInt = 100
    """also at the start and the end"""
    max_sequences: PositiveInt = 64
    """of each held-out part"""


class Checkpoints(Section):
    """When to save, and which checkpoints to keep."""

    every_steps: PositiveInt = 500
    """also at the end and on a signal"""
    keep_last: PositiveInt = 2
    """how many of the newest are kept; also more, until one lies before any spike (stability.spike_steps)"""
    keep_every_steps: PositiveInt | None = None
    """its multiples are never deleted"""
    asynchronous: bool = False
    """continue training while a copy in host memory is written"""

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> Checkpoints:
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"keep_every_steps must be a multiple of every_steps {self.every_steps}"
            )
        return self


class RunConfig(Section):
    """All settings of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """letters, digits, dots, dashes, underscores"""
    folder: Path
    """the run folder, which holds everything that the run writes"""
    seed: NonNegativeInt = 1234
    """seed of the data order and of random initial blocks"""
    base: Path
    """a Hugging Face folder with safetensors, or a model on the hub: `meta-llama/Llama-3.2-1B`, `org/name@revision`"""
    base_precision: BasePrecision = "bf16"
    """of the frozen linear maps: in the type that the deepspeed file sets, or stored in 8 or 4 bits (docs/method.md)"""
    vocabulary: VocabularySettings | None = None
    """a tokenizer with more tokens than the base's; default: the base's own"""
    init_expansion: Path | None = None
    """an expansion to train on, exported by another run; default: a new one, in <folder>/initial_expansion"""
    method: Method
    """what trains"""
    data: Data
    """corpora and samples"""
    schedule: Schedule
    """steps, batch and learning rate"""
    gate: GateSettings | None = None
    """fitted after training; default: none"""
    parallel: Parallel = Parallel()
    """layout of the ranks"""
    validation: Validation = Validation()
    """held-out scores during the run"""
    checkpoints: Checkpoints = Checkpoints()
    """when to save"""
    stability: Stability = Stability()
    """handling of bad steps"""
    forgetting: Forgetting = Forgetting()
    """how much may be lost"""
    preflight: Preflight = Preflight()
    """checks before the first step"""
    watchdog: Watchdog = Watchdog()
    """when lost or hung ranks end the run"""
    metrics: Metrics = Metrics()
    """MFU and progress lines"""
    profile: Profile = Profile()
    """which steps are traced"""
    observers: TrackerSettings = TrackerSettings()
    """experiment trackers"""
    deepspeed: Path
    """a file of ds_configs/: ZeRO and precision"""
    activation_checkpointing: Literal["none", "collaborative", "all"] = "none"
    """recompute activations in the backward pass: of the layers above l_fp, or of all"""
    deterministic: bool = False
    """on GPUs: the same command gives the same bits, where there are such kernels; slower (docs/checkpoints.md)"""
    compile: bool = False
    """compile each layer with torch.compile (not under ZeRO-3): steps of 9 to 14 % less time on an H100"""

    @model_validator(mode="after")
    def _gate_fits(self) -> RunConfig:
        if self.gate is None:
            return self
        if not isinstance(self.method, ScaleMethod):
            raise ValueError(
                f"gate: method {self.method.name} adds no blocks that it could close; remove it"
            )
        layer, l_fp = self.gate.layer, self.method.l_fp
        if (
            self.method.variant == "adapt"
            and layer is not None
            and l_fp is not None
            and layer > l_fp
        ):
            raise ValueError(
                f"gate.layer: {layer} is above method.l_fp {l_fp}, where adapt changes the base's stream"
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

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> RunConfig:
        heldout = {
            own.role
            for own in self.data.corpora.values()
            if own.heldout_input or own.heldout_fraction
        }
        method, limits = self.method, self.forgetting
        if self.init_expansion is not None and not isinstance(method, ScaleMethod):
            raise ValueError(f"init_expansion: method {method.name} trains no expansion; remove it")
        if limits.max_kl_from_base is not None and isinstance(method, (FullFineTuning, Freeze)):
            raise ValueError(
                f"forgetting.max_kl_from_base: method {method.name} keeps no base; set max_increase"
            )
        if (limits.max_increase, limits.max_kl_from_base) != (
            None,
            None,
        ) and "replay" not in heldout:
            raise ValueError("forgetting: needs a corpus of role replay with a held-out part")
        return self

    @property
    def gate_negatives(self) -> list[str]:
        """The corpora of text that is not new, from which a gate learns."""
        by_role: dict[Role, list[str]] = {"new": [], "replay": [], "self_generated": []}
        for name, corpus in self.data.corpora.items():
            by_role[corpus.role].append(name)
        named = [] if self.gate is None else self.gate.negatives
        return named or by_role["self_generated"] or by_role["replay"]

    @property
    def tokenizer(self) -> Path:
        """Where the run's tokenizer lies: the base's own, or the extended one."""
        return self.base if self.vocabulary is None else self.vocabulary.folder

    @property
    def checkpoint_folder(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.folder / CHECKPOINTS

    @property
    def initial_expansion_folder(self) -> Path:
        """Where the initial expansion lies."""
        return self.init_expansion or self.folder / "initial_expansion"


def parse_config(values: Mapping[str, Any], *, source: str) -> RunConfig:
    """The configuration in `values`. Raises ConfigError, with all faults, after `source`, the origin of the values."""
    return checked(RunConfig, values, source=source, listed_in="docs/configuration.md")


def load_config(path: Path, changes: Sequence[str] = (), *, base: HubModels = "whole") -> RunConfig:
    """The run that the YAML file or the run's folder `path` describes, with `changes`, such as `schedule.steps=20`.

    Relative paths in it count from the working directory.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not describe a run, or a change is none of its settings.
    """
    source = " ".join([str(path), *(f"{COMMAND_LINE} {change}" for change in changes)])
    config = parse_config(read_settings(path, changes), source=source)
    if base == "named":
        return config
    found: dict[str, Any] = {"base": _here(config.base, weights=base == "whole")}
    if (vocabulary := config.vocabulary) is not None:
        found["vocabulary"] = vocabulary.model_copy(
            update={"folder": _here(vocabulary.folder, weights=False)}
        )
    return config.model_copy(update=found)


def _here(named: Path, *, weights: bool) -> Path:
    """The folder on this machine of a model, which is fetched from the hub.

    A model that cannot be had stays a name: whoever opens it finds out why, beside other faults.
    """
    try:
        return model_folder(named, weights=weights)
    except BaseModelError:
        return named
