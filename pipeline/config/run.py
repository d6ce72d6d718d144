"""The run configuration: one YAML file per run, checked as a whole before anything starts.

Unknown keys are refused, and all faults are reported together with their dotted paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.data import CorpusName, Data, Role
from pipeline.config.method import Freeze, FullFineTuning, Lora, Method, ScaleMethod
from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section, checked
from pipeline.config.schedule import Schedule
from pipeline.config.sources import CHECKPOINTS, COMMAND_LINE, read_settings
from pipeline.config.stages import Stage, check_stages
from pipeline.errors import BaseModelError
from pipeline.hub import model_folder

BaseCode = Literal["native", "transformers"]
BasePrecision = Literal["bf16", "fp8", "nf4"]
Fp8Scaling = Literal["tensor", "row"]
"""What shares a scale in a matrix in fp8: all elements, or those of a row."""
GradientPrecision = Literal["e4m3", "e5m2", "bf16"]
"""How the product with a gradient is computed: in one of the types of fp8, or in bf16 with the
decoded matrix."""
GateFeatures = Literal["token", "token+running_mean"]
HubModels = Literal["whole", "described", "named"]
"""How models that a configuration names on the hub are fetched: whole, without weights, or not."""


class Fp8Settings(Section):
    """How a base in fp8 is stored and multiplied. Without `base_precision: fp8` nothing reads
    this."""

    scaling: Fp8Scaling = "tensor"
    """what shares a scale in a matrix of the base: all of it (tensor), or each row (row)"""
    gradient: GradientPrecision = "e5m2"
    """how the gradient of a frozen product's input is computed: in fp8 with gradients in e4m3 or
    e5m2, or in bf16 with the decoded matrix. Only runs in bf16 compute in fp8"""
    skip_small: bool = True
    """whether matrices with one side up to 1,024 and the other up to 4,096 are multiplied in bf16,
    which is faster on an H100"""


class OpenIdSettings(Section):
    """Ids that the gate opens whatever their score, because old text hardly ever has them."""

    min_count: PositiveInt = 20
    """how often an id must occur in the corpora of role new; its share of them must also be a
    hundred times its share of old text"""


class GateSettings(Section):
    """The gate, which decides per token whether the text is new (docs/gate.md). Methods scale,
    lora and fft only.

    It is fitted after training.
    """

    features: GateFeatures = "token+running_mean"
    """what the gate reads of the base's residual stream: each token's state, or also the running
    mean of the states in the document so far"""
    layer: NonNegativeInt | None = None
    """layer before which the gate reads the stream; default: the last place where the stream is
    exactly the base's, which is after the last layer for preserve and route, before layer l_fp for
    adapt, and before layer own_first_layer for weights of open tokens' own; 2 where that would be
    0, and for fft. Layers below a gate that reads further up run twice, for fft all below it"""
    negatives: list[CorpusName] = []
    """names of the corpora of text that is not new, from which the gate learns to stay closed;
    default: the corpora of role self_generated, or the corpora of role replay if there are none"""
    tokens: PositiveInt = 100_000
    """tokens of each kind of text (new, and not new) to fit the gate on; as many others of each
    kind set its threshold"""
    splices: bool = False
    """whether the gate is also fitted on windows that begin in one kind of text and end in the
    other"""
    max_open_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """largest share of the tokens that are not new on which the gate may open; sets its
    threshold"""
    open_ids: OpenIdSettings | None = OpenIdSettings()
    """ids that the gate opens whatever their score, as text that is not new hardly ever has them;
    null: no ids"""


class VocabularySettings(Section):
    """An extended tokenizer (scale-cpt vocabulary), whose new tokens get rows
    (docs/vocabulary.md)."""

    folder: Path
    """folder that scale-cpt vocabulary wrote"""
    initial: Literal["mean", "last-weighted", "zero"] = "mean"
    """first embedding row of a new token: the mean of the rows of the base's tokens that spell it,
    the mean with weights 1, 2, 3, … (last-weighted), or zero"""


class Metrics(Section):
    """Peak performance for MFU, and the interval of progress lines (docs/metrics.md)."""

    peak_tflops: PositiveFloat | None = None
    """dense peak of one device in the run's precision, the reference of MFU; default: NVIDIA's
    16-bit figure for known GPUs; without a peak no MFU is reported"""
    log_every_s: PositiveFloat = 10.0
    """least number of seconds between two progress lines in a log"""


class Profile(Section):
    """Steps that torch.profiler traces into `<folder>/profile`; other steps are unaffected."""

    steps: tuple[PositiveInt, PositiveInt] | None = None
    """first and last traced step, counted from 1; default: no step is traced"""
    ranks: list[NonNegativeInt] = [0]
    """ranks that write a trace, a file for each"""

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
    """name of the project in Weights & Biases"""
    entity: str | None = None
    """user or team that owns the project; default: the logged-in user"""
    mode: Literal["online", "offline"] = "online"
    """online sends figures at once; offline writes them to `<folder>/wandb` for a later `wandb
    sync`"""


class MlflowTracker(Section):
    """MLflow. Needs `pip install 'scale-cpt[mlflow]'`."""

    tracking_uri: str
    """MLflow server or database: `http://host:5000`, `sqlite:///runs/mlflow.db`"""
    experiment: str = "scale-cpt"
    """name of the experiment in MLflow, created if it does not exist"""


class TrackerSettings(Section):
    """Experiment trackers, which also get the figures of every step (docs/metrics.md)."""

    wandb: WandbTracker | None = None
    """Weights & Biases; default: off"""
    mlflow: MlflowTracker | None = None
    """MLflow; default: off"""


class Preflight(Section):
    """Checks of the allocation before the first step; they take seconds."""

    enabled: bool = True
    """whether the allocation is checked before the first step"""
    min_gb_per_s: Annotated[float, Field(ge=0)] | None = None
    """lowest rate at which a rank sends in an all-reduce; default: 0.5 on GPUs, 0.001 on CPUs"""
    slow_factor: Annotated[float, Field(gt=1)] | None = None
    """how many times longer than on the other ranks a matrix product may take on one rank; default:
    no limit, and the log names the slowest rank"""


class Stability(Section):
    """The handling of bad steps, and when a run is ended as diverged (docs/stability.md)."""

    max_skipped_steps: NonNegativeInt = 20
    """most skipped steps of the whole run, those with NaN or infinity and those after a rollback
    together; beyond it the run ends as diverged"""
    # In nats above the median, not as a multiple: near a loss of 0.01 noise alone doubles it
    # (docs/adr/0011-one-job-a-run-folder.md).
    loss_increase: PositiveFloat | None = 1.0
    """how many nats per token above its running median the loss of a spike lies; null: the loss
    never makes a spike"""
    gradient_norm_factor: Annotated[float, Field(gt=1)] | None = 10.0
    """how many times its running median the gradient norm of a spike is, if it is also clipped;
    null: the gradient norm never makes a spike"""
    window: Annotated[int, Field(ge=2)] = 128
    """number of steps of the running medians; earlier in a run no step counts as a spike"""
    # Three in a row, because training recovers from a single bad batch.
    spike_steps: PositiveInt = 3
    """number of spikes in a row after which the run rolls back to the last checkpoint before them,
    and skips them"""
    max_rollbacks: NonNegativeInt = 3
    """most rollbacks of the whole run; the next spike ends it as diverged"""

    @property
    def rollback_steps(self) -> int:
        """How many steps before the newest checkpoint the one for a rollback must lie, at least."""
        finds_spikes = self.loss_increase is not None or self.gradient_norm_factor is not None
        return self.spike_steps if finds_spikes and self.max_rollbacks > 0 else 0


class Forgetting(Section):
    """How much of the base's own domain may be forgotten; checked at each validation.

    The held-out parts of the corpora of role replay stand for that domain.
    """

    max_increase: PositiveFloat | None = None
    """largest growth of the held-out perplexity since step 0, as a fraction; default: no limit"""
    max_kl_from_base: PositiveFloat | None = None
    """largest KL(base || model) in nats per token, on the first held-out batch of validation.probe,
    or of role replay; default: no limit"""
    action: Literal["warn", "stop", "lower_learning_rate"] = "warn"
    """what happens beyond either limit: a warning in the log (warn), saving and ending the run
    (stop), or a lower learning rate for the rest of the run (lower_learning_rate)"""
    learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """factor by which action lower_learning_rate multiplies the learning rate each time"""


class WatchdogSettings(Section):
    """When a run with lost or hung ranks ends, to be restarted."""

    beat_every_s: PositiveFloat = 5.0
    """seconds between two heartbeats of a rank; longer with more than 500 ranks"""
    dead_after_s: PositiveFloat = 60.0
    """seconds without a heartbeat after which a rank counts as lost; the end of a process is
    noticed immediately"""
    # Of a phase, not a step: a step may include a validation or a save, which take minutes.
    hung_after_s: PositiveFloat = 600.0
    """seconds that every rank may stay in one phase of a step (data, forward, backward, step)
    before the run counts as hung"""
    slow_after_s: PositiveFloat = 1800.0
    """seconds that every rank may stay in the start, in a validation or in saving before the run
    counts as hung"""


class Parallel(Section):
    """The layout of the ranks; the data-parallel size is the world size divided by tp_size."""

    tp_size: PositiveInt = 1
    """tensor-parallel size: ranks that share each layer, best within a node"""
    sequence_parallel: bool = False
    """whether a tensor-parallel rank holds only its share of each sequence between the shared
    layers, which takes less memory"""
    expert_size: PositiveInt = 1
    """number of data-parallel ranks that share the frozen experts of a mixture: each holds some of
    them whole, and computes them for the tokens of all (docs/sizing.md)"""
    padded_experts: bool = False
    """whether these ranks make room for all rows that their experts could get: the host then never
    waits for the number of rows, but a layer's experts take up to expert_size times the memory"""

    @property
    def fewest_ranks(self) -> int:
        """How many ranks hold the model once."""
        return self.tp_size * self.expert_size


class ValidationSettings(Section):
    """Held-out perplexity during the run, for each corpus with a held-out part."""

    every_steps: PositiveInt = 100
    """number of steps from one validation to the next; there is one at the start and at the end,
    too"""
    max_sequences: PositiveInt = 64
    """most sequences that are scored of each held-out part"""
    probe: CorpusName | None = None
    """corpus with a held-out part, of any role, on whose first held-out batch the drift from the
    base is measured; default: the first corpus of role replay"""
    prompts: list[str] = []
    """texts that the model continues at each validation, each token the likeliest; the
    continuations go to TensorBoard and the trackers"""
    prompt_tokens: PositiveInt = 64
    """number of tokens by which each prompt is continued"""
    tasks: list[str] = []
    """lm-eval's tasks that the model in training answers, with choices or written answers
    (docs/evaluation.md)"""
    tasks_every: PositiveInt = 1
    """number of validations from one answering of the tasks to the next; the first and the last
    step's validations have one, too"""
    tasks_limit: PositiveInt | None = None
    """most questions of each task, the first ones; default: all"""
    few_shot: NonNegativeInt | None = None
    """solved examples before each question of a task; default: the task's own number"""
    tasks_folder: Path | None = None
    """folder of your own tasks in lm-eval's format, whose Python code is run; default: none"""
    stop_after: PositiveInt | None = None
    """number of validations in a row without a lower nll_per_token on the new text, after which the
    run cools down and ends (docs/stability.md); default: the run ends with its schedule"""
    cool_down_steps: NonNegativeInt = 0
    """steps over which the learning rate falls to its end before a run that `stop_after` stops
    ends"""

    @model_validator(mode="after")
    def _settings_belong_together(self) -> ValidationSettings:
        if self.cool_down_steps and self.stop_after is None:
            raise ValueError("cool_down_steps: belongs to stop_after; set it, or remove this")
        if self.tasks_folder is not None and not self.tasks:
            raise ValueError("tasks_folder: belongs to tasks; name some, or remove it")
        if any(not prompt.strip() for prompt in self.prompts):
            raise ValueError("prompts: expected texts, found an empty one")
        return self


class CheckpointSettings(Section):
    """When to save, and which checkpoints to keep."""

    every_steps: PositiveInt = 500
    """number of steps from one checkpoint to the next; the end and a signal save one, too"""
    keep_last: PositiveInt = 2
    """number of the newest checkpoints that are kept; more are kept while none of them lies before
    the last `stability.spike_steps` steps"""
    keep_every_steps: PositiveInt | None = None
    """steps whose multiples are kept for good; default: no checkpoint is kept for good"""
    asynchronous: bool = False
    """whether training continues while a copy in host memory is written"""

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> CheckpointSettings:
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"keep_every_steps must be a multiple of every_steps {self.every_steps}"
            )
        return self


class RunConfig(Section):
    """All settings of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """name of the run, of letters, digits, dots, dashes and underscores"""
    folder: Path
    """run folder, which holds everything that the run writes"""
    seed: NonNegativeInt = 1234
    """seed of the data order and of random initial blocks"""
    base: Path
    """pretrained model: a Hugging Face folder with safetensors, or a model on the hub,
    `meta-llama/Llama-3.2-1B` or `org/name@revision`"""
    base_code: BaseCode | None = None
    """whose code computes the base: the package's own (native), or transformers', which knows every
    model_type but trains with fewer settings (docs/architectures.md); default: native where there
    is a family for the base's model_type"""
    base_precision: BasePrecision = "bf16"
    """how frozen linear maps are stored: in the type that the deepspeed file sets (bf16), or in 8
    bits (fp8) or 4 (nf4; docs/method.md)"""
    fp8: Fp8Settings = Fp8Settings()
    """how a base in fp8 is stored and multiplied (docs/method.md)"""
    vocabulary: VocabularySettings | None = None
    """tokenizer with more tokens than the base's; default: the base's own"""
    init_expansion: Path | None = None
    """expansion to start from, exported by another run; default: a new one, in
    <folder>/initial_expansion"""
    method: Method
    """which parameters train, and how they start"""
    data: Data
    """corpora, their proportions, and their packing"""
    schedule: Schedule
    """steps, batch and learning rate"""
    stages: list[Stage] = []
    """stages in which the run trains; default: one, with everything (docs/stages.md)"""
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
    """when lost or hung ranks end the run"""
    metrics: Metrics = Metrics()
    """peak performance for MFU, and progress lines"""
    profile: Profile = Profile()
    """steps that the profiler traces"""
    observers: TrackerSettings = TrackerSettings()
    """experiment trackers"""
    deepspeed: Path
    """DeepSpeed configuration, a file of ds_configs/, for ZeRO and precision only"""
    activation_checkpointing: Literal["none", "collaborative", "all"] = "none"
    """layers whose activations are recomputed in the backward pass: none, the layers from l_fp on
    (collaborative), or all"""
    recomputation_keeps: Literal["nothing", "attention", "products"] = "nothing"
    """results that those layers keep all the same: nothing, the results of attention kernels
    (attention), or also the products of gate and up maps (products; docs/sizing.md)"""
    deterministic: bool = False
    """whether GPUs use deterministic kernels where there are any, so that a command gives equal
    bits each time; slower (docs/checkpoints.md)"""
    compile: bool = False
    """whether each layer is compiled with torch.compile (not under ZeRO-3); steps take 9 to 14 %
    less time on an H100"""

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
            self._check_gate_of_difference(self.gate)
        elif not isinstance(self.method, (ScaleMethod, Lora)):
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
        """The gate of full fine-tuning, whose export is the base and a difference."""
        if gate.layer == 0:
            raise ValueError(
                "gate.layer: with method fft at least 1, as before layer 0 there is the token "
                "alone, found 0"
            )
        if self.vocabulary is not None:
            raise ValueError(
                "gate: not with method fft beside an extended vocabulary, for whose tokens the "
                "base has no rows; remove gate or vocabulary"
            )

    @model_validator(mode="after")
    def _own_weights_have_a_gate(self) -> RunConfig:
        method = self.method
        if not isinstance(method, (ScaleMethod, Lora)) or not method.has_own_weights:
            return self
        if self.gate is None:
            settings = "own_rows, own_gains, low_rank"
            if isinstance(method, Lora):
                settings = "own_rows, own_gains"
            raise ValueError(
                f"method.{settings}: only tokens that a gate opens read them, "
                "without one the base's outputs would change; add a section gate, or remove them"
            )
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> RunConfig:
        method = self.method
        limits = self.forgetting
        if self.init_expansion is not None and not isinstance(method, ScaleMethod):
            raise ValueError(f"init_expansion: method {method.name} trains no expansion; remove it")
        if limits.max_kl_from_base is not None and isinstance(method, (FullFineTuning, Freeze)):
            raise ValueError(
                f"forgetting.max_kl_from_base: method {method.name} keeps no base; set max_increase"
            )
        # Forgetting is measured on held-out replay alone: without any, a limit would silently never
        # apply.
        has_probe = self.validation.probe is not None or self._has_heldout_replay()
        lacks_text = limits.max_increase is not None and not self._has_heldout_replay()
        if lacks_text or (limits.max_kl_from_base is not None and not has_probe):
            raise ValueError(
                "forgetting: needs a corpus of role replay with a held-out part, or, for "
                "max_kl_from_base, validation.probe"
            )
        return self

    def _has_heldout_replay(self) -> bool:
        for name, corpus in self.data.corpora.items():
            if corpus.role == "replay" and self._has_heldout(name):
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
            if isinstance(self.method, (FullFineTuning, Freeze)):
                raise ValueError(
                    f"validation.probe: method {self.method.name} keeps no base to compare with; "
                    "remove it"
                )
        if self.validation.stop_after is not None and self.stages:
            raise ValueError(
                "validation.stop_after: not with `stages`, of which one that gains nothing may "
                "come before one that does; remove one of the two"
            )
        new = [name for name, corpus in self.data.corpora.items() if corpus.role == "new"]
        if self.validation.stop_after is not None and not any(map(self._has_heldout, new)):
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
        """The corpora of text that is not new, from which a gate learns."""
        by_role: dict[Role, list[str]] = {"new": [], "replay": [], "self_generated": []}
        for name, corpus in self.data.corpora.items():
            by_role[corpus.role].append(name)
        if self.gate is not None and self.gate.negatives:
            return self.gate.negatives
        return by_role["self_generated"] or by_role["replay"]

    @property
    def trains(self) -> list[str]:
        """What trains in one of the stages, of all that the method trains; empty: everything."""
        trained: list[str] = []
        for stage in self.stages:
            if not stage.trains:
                return []
            trained += stage.trains
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
    """The configuration in `values`; `source` is their origin, which errors name.

    Raises:
        ConfigError: the values do not describe a run; all faults are in its one line.
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
        ConfigError: the file is missing, is not YAML, or does not describe a run, or a change is
            none of its settings.
    """
    source = str(path)
    for change in changes:
        source += f" {COMMAND_LINE} {change}"
    config = parse_config(read_settings(path, changes), source=source)
    if base == "named":
        return config

    folders: dict[str, Any] = {"base": _local_folder(config.base, weights=base == "whole")}
    if config.vocabulary is not None:
        folder = _local_folder(config.vocabulary.folder, weights=False)
        folders["vocabulary"] = config.vocabulary.model_copy(update={"folder": folder})
    return config.model_copy(update=folders)


def _local_folder(named: Path, *, weights: bool) -> Path:
    """The folder on this machine of a model, which is fetched from the hub if it is named there.

    A model that cannot be had stays a name: whoever opens it finds out why, beside other faults.
    """
    try:
        return model_folder(named, weights=weights)
    except BaseModelError:
        return named
