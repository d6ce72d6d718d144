"""The files that a run's configuration names, opened before ranks allocate memory.

Nothing here calls a collective: dry runs and stages of one process use it, too.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline import log
from pipeline.checkpoint.folder import candidates
from pipeline.checkpoint.manifest import (
    SAME_MODEL,
    SAME_OVER_A_RUN,
    CheckpointManifest,
    check_same_run,
    describe_run,
    load_manifest,
)
from pipeline.checkpoint.position import Position
from pipeline.checks.lost_checkpoints import check_no_checkpoint_is_lost
from pipeline.checks.model_fit import check_fits, read_parameter_groups
from pipeline.config.run import RunConfig
from pipeline.config.stage_plan import TrainingStage, training_stages
from pipeline.conversion.convert import run_texts
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.samples import (
    HeldoutSamples,
    StageSamples,
    check_predicts,
    load_heldout,
    samples_of_stages,
)
from pipeline.data.tokenizer.extension.vocabulary import read_vocabulary
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, deepspeed_config_of
from pipeline.errors import CheckpointError, DamagedCheckpointError, UserError
from pipeline.methods.build_model import build_model
from pipeline.methods.method import TrainingMethod
from pipeline.methods.parameter_groups import GroupRow
from pipeline.methods.registry import training_method
from pipeline.methods.vocabulary import extended_spec, with_new_tokens
from pipeline.model.base_folder import BaseFolder
from pipeline.model.bases import check_dtype, open_base, read_spec
from pipeline.model.flash_attention import (
    FlashChoice,
    choose_flash_attention,
    device_capability,
    installed_version,
)
from pipeline.model.spec import DecoderSpec
from pipeline.optimizers.optimizer import check_optimizer
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.run_folder.checkpoint_names import LATEST
from pipeline.run_folder.status import is_trained

_logger = log.get_logger(__name__)


class Samples(NamedTuple):
    """The training samples of each stage of a run, and its held-out samples."""

    training: tuple[StageSamples, ...]
    heldout: dict[str, HeldoutSamples]

    @property
    def corpora(self) -> list[TokenCorpus]:
        """The corpora that the samples are read from, each once."""
        corpora: dict[Path, TokenCorpus] = {}
        for stage in self.training:
            for packed in stage.samples.corpora.values():
                corpora.setdefault(packed.source.folder, packed.source)
        for part in self.heldout.values():
            corpora.setdefault(part.packed.source.folder, part.packed.source)
        return list(corpora.values())

    @property
    def contents(self) -> dict[str, str]:
        """The hash of each corpus's content, by the name of its folder."""
        return {corpus.folder.name: corpus.content for corpus in self.corpora}


class RunInputs:
    """The inputs of a run. A property is opened when it is first read, and may raise a UserError.

    Rank 0 opens the inputs and broadcasts them to the other ranks, except the tokenizer.

    Args:
        config: The run.
        world_size: The number of ranks that train it.
        base_config: A config.json to use where the base's folder is missing.
    """

    def __init__(self, config: RunConfig, world_size: int, base_config: Path | None = None) -> None:
        self.config = config
        self._world_size = world_size
        self._base_config = base_config

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, and so broadcast: everything that is open but the tokenizer."""
        state = dict(self.__dict__)
        # It has objects of Rust and C++ libraries, some of which cannot be pickled. The other ranks
        # need its fingerprint only.
        state.pop("tokenizer", None)
        return state

    def get_or_none(self, name: str) -> Any:
        """The property of this name, or None where it cannot be opened."""
        try:
            return getattr(self, name)
        except UserError:
            return None

    @cached_property
    def layout(self) -> Layout:
        """The layout of the ranks, over which the batch divides."""
        parallel = self.config.parallel
        layout = Layout(self._world_size, parallel.tp_size, parallel.expert_size)
        for stage in self.stages:
            setting = f"stages.{stage.name}" if stage.name else "schedule"
            accumulation_steps(stage.config.schedule, layout.dp_size, setting=setting)
        return layout

    @cached_property
    def stages(self) -> list[TrainingStage]:
        """The stages of the run, at least one."""
        return training_stages(self.config)

    @cached_property
    def deepspeed_config(self) -> DeepSpeedConfig:
        """DeepSpeed's JSON, checked, and completed for this run."""
        opened = deepspeed_config_of(self.config, self.layout)
        check_optimizer(self.config.schedule, opened)
        return opened

    @cached_property
    def flash_attention(self) -> FlashChoice:
        """The kernels of attention on the GPUs that this process sees, or on unknown ones."""
        return choose_flash_attention(
            self.config.flash_attention,
            self.spec,
            self.deepspeed_config.dtype,
            device_capability(),
            installed_version(),
        )

    @cached_property
    def base(self) -> BaseFolder:
        """The base model's folder; the rows of the run's new tokens count as part of it."""
        return with_new_tokens(self.config, open_base(self.config.base, self.config.base_code))

    @cached_property
    def spec(self) -> DecoderSpec:
        """The base's architecture."""
        if self._base_config is None or self.get_or_none("base") is not None:
            return self.base.spec
        return extended_spec(self.config, read_spec(self._base_config, self.config.base_code))

    @cached_property
    def fitting_spec(self) -> DecoderSpec:
        """The base's architecture, after a check that the run's model can be built on it."""
        check_fits(self.config, self.spec)
        deepspeed = self.get_or_none("deepspeed_config")
        if deepspeed is not None:
            check_dtype(self.spec, deepspeed.dtype)
        return self.spec

    @cached_property
    def method(self) -> TrainingMethod:
        """The training method: which parameters train."""
        return training_method(self.config)

    @cached_property
    def parameter_groups(self) -> list[GroupRow]:
        """The table of groups of parameters, each with its learning rate and weight decay.

        Raises:
            ConfigError: a factor of the schedule is for parameters that are not there.
        """
        return read_parameter_groups(self.config, self.fitting_spec)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, by default the base's."""
        if not self.config.tokenizer.exists():
            # A missing base lacks its tokenizer too: the error must name the base.
            _ = self.base
        return load_tokenizer(self.config.tokenizer)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Equal for tokenizers that produce equal ids."""
        return self.tokenizer.fingerprint

    @cached_property
    def compared_texts(self) -> list[str]:
        """Beginnings of the run's texts on this machine, on which tokenizers are compared."""
        return list(run_texts(self.config))

    @cached_property
    def samples(self) -> Samples:
        """The samples of the token corpora, which must last to the end of the run.

        The corpora must be made with the run's tokenizer. Where it cannot be opened, which is a
        fault of its own, corpora of any tokenizer are taken.

        Raises:
            DataError: the corpora end before the run does, are of another tokenizer, or predict
                nothing.
        """
        config = self.config
        fingerprint = self.get_or_none("tokenizer_fingerprint")
        sampled_fingerprint = None
        if config.vocabulary is not None:
            # The base writes its text with its own tokenizer, before the new tokens are added.
            sampled_fingerprint = read_vocabulary(config.vocabulary.folder).base_tokenizer
        training = samples_of_stages(
            self.stages,
            seed=config.seed,
            tokenizer_fingerprint=fingerprint,
            sampled_fingerprint=sampled_fingerprint,
        )
        heldout = load_heldout(config.data, tokenizer_fingerprint=fingerprint)
        check_predicts(training, heldout, config.validation.max_sequences)
        return Samples(training, heldout)

    @cached_property
    def finished(self) -> bool:
        """Whether an earlier attempt finished the run, which is logged.

        Only the newest checkpoint's manifest is read, not its tensors.

        Raises:
            CheckpointError: The newest checkpoint is of another base, base_precision or method; or
                of other data, unless the run is finished; or the run cannot go on from its step.
                Also where the run's records say that it had checkpoints, and there is none.
        """
        config = self.config
        for checkpoint in candidates(config.checkpoint_folder):
            try:
                manifest = load_manifest(checkpoint)
            except DamagedCheckpointError:
                continue  # Resuming reports it, and takes the one before.
            # A run whose schedule.steps was raised goes on.
            step = manifest.position.step
            finished = is_trained(config.folder) and step >= manifest.position.last_step(config)
            self._check_continues(checkpoint, manifest, finished=finished)
            if finished:
                _logger.info("%s is trained to step %d: nothing to train", config.folder, step)
            else:
                _check_position(manifest.position, checkpoint, config)
            return finished
        check_no_checkpoint_is_lost(config)
        return False

    def _check_continues(
        self, checkpoint: Path, manifest: CheckpointManifest, *, finished: bool
    ) -> None:
        """Checks that this run wrote the checkpoint.

        Raises:
            CheckpointError: the run differs from the one that wrote it.
        """
        # Only names and shapes are compared. On the meta device they take no memory, of which rank
        # 0 may have less than the model needs.
        with torch.device("meta"):
            model = build_model(self.config, self.base.spec, SINGLE)
        contents: dict[str, str] | None = None
        samples: Samples | None = None
        if not finished:
            # A finished run no longer needs its corpora, which may be gone.
            samples = self.get_or_none("samples")
        if samples is not None:
            contents = samples.contents
        run = describe_run(self.config, self.base, model, self.tokenizer_fingerprint, contents)
        compared = SAME_MODEL if finished else SAME_OVER_A_RUN
        check_same_run(manifest, checkpoint, run, compared)

    @cached_property
    def starts_at_base(self) -> bool:
        """Whether the model's logits must equal the base's before the first step.

        They need not where training starts from an expansion that was trained before.
        """
        if self.finished:
            return True
        return self.method.expansion is None or not self.method.expansion.is_trained


def _check_position(position: Position, checkpoint: Path, config: RunConfig) -> None:
    """Checks that a run can go on from where a checkpoint stands.

    Raises:
        CheckpointError: schedule.steps ends the run before it; or validations would score other
            text than the one from which the run's forgetting is measured.
    """
    if position.step > config.schedule.steps:
        raise CheckpointError(
            f"{checkpoint}: is of step {position.step}, and schedule.steps is "
            f"{config.schedule.steps}; set schedule.steps to {position.step} or more, or write the "
            f"name of an earlier checkpoint into {checkpoint.parent / LATEST}"
        )
    scored = position.scored_sequences
    if position.initial_nll_per_token and scored not in (None, config.validation.max_sequences):
        raise CheckpointError(
            f"{checkpoint}: the run scored {scored} sequences of each held-out part before its "
            f"first step, and validation.max_sequences is {config.validation.max_sequences}; set "
            "it back, as the scores of other text say nothing of what is forgotten (to validate "
            "less often: validation.every_steps)"
        )
