"""What the configuration of a run names, opened and checked before any rank allocates memory, without communication."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pipeline import log
from pipeline.checkpoint.folder import candidates
from pipeline.checkpoint.manifest import (
    SAME_MODEL,
    SAME_OVER_A_RUN,
    check_same_run,
    describe_run,
    load_manifest,
)
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import run_texts
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.samples import HeldoutSamples, TrainingSamples, load_heldout
from pipeline.data.tokenizer.extension.vocabulary import read_vocabulary
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, deepspeed_config_of
from pipeline.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    UserError,
)
from pipeline.methods import build_model, training_method
from pipeline.methods.method import TrainingMethod
from pipeline.methods.vocabulary import extended_spec, with_new_tokens
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import read_attempts
from pipeline.run_folder.checkpoint_names import named_checkpoint
from pipeline.run_folder.metrics import METRICS
from pipeline.run_folder.status import TRAINING, is_trained
from pipeline.sizing.micro_batch import imagined_ranks

Stage = Literal["tokenize", "train"]
_logger = log.get_logger(__name__)


class Samples(NamedTuple):
    """The training and held-out samples of a run."""

    training: TrainingSamples
    heldout: dict[str, HeldoutSamples]

    @property
    def corpora(self) -> list[TokenCorpus]:
        """The corpora that they are read from."""
        packed = (*self.training.corpora.values(), *(part.packed for part in self.heldout.values()))
        return [each.source for each in packed]

    @property
    def contents(self) -> dict[str, str]:
        """The hash of what each of them holds, by the name of its folder."""
        return {corpus.folder.name: corpus.content for corpus in self.corpora}


class Inputs:
    """What a run reads; each property is opened, and raises a UserError, when it is first asked for.

    Rank 0 broadcasts it with all that it has opened except the tokenizer. `base_config` is a config.json to use where
    the base's folder is missing. `stage` is the stage that begins; None in a dry run.
    """

    def __init__(
        self,
        config: RunConfig,
        world_size: int,
        base_config: Path | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.config, self.stage = config, stage
        self._world_size, self._base_config = world_size, base_config

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tokenizer"}

    def get(self, name: str) -> Any:
        """One of the properties; None where it cannot be opened."""
        try:
            return getattr(self, name)
        except UserError:
            return None

    @cached_property
    def layout(self) -> Layout:
        """The layout of the ranks, over which the batch divides."""
        layout = Layout(self._world_size, self.config.parallel.tp_size)
        accumulation_steps(self.config.schedule, layout.dp_size)
        return layout

    @cached_property
    def deepspeed_config(self) -> DeepSpeedConfig:
        return deepspeed_config_of(self.config, self.layout)

    @cached_property
    def base(self) -> BaseFolder:
        """The base, with the rows of the run's own pieces."""
        return with_new_tokens(self.config, open_base(self.config.base))

    @cached_property
    def spec(self) -> DecoderSpec:
        """The base's architecture."""
        if self._base_config is None or self.get("base") is not None:
            return self.base.spec
        return extended_spec(self.config, read_spec(self._base_config))

    @cached_property
    def fitting_spec(self) -> DecoderSpec:
        """The architecture of a base on which the run's model can be built."""
        check_fits(self.config, self.spec)
        return self.spec

    @cached_property
    def method(self) -> TrainingMethod:
        """What trains."""
        return training_method(self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.config.tokenizer.exists():
            self.base  # noqa: B018  # its fault is that of the tokenizer, which is missing with it
        return load_tokenizer(self.config.tokenizer)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Equal for tokenizers that produce equal ids."""
        return self.tokenizer.fingerprint

    @cached_property
    def compared_texts(self) -> list[str]:
        """The beginnings of the corpora that are text and on this machine, on which tokenizers are compared."""
        return list(run_texts(self.config))

    @cached_property
    def samples(self) -> Samples:
        """The token corpora, which last to the end of the run; with a tokenizer that cannot be opened, of any."""
        config, fingerprint = self.config, self.get("tokenizer_fingerprint")
        sampled = (
            None
            if config.vocabulary is None
            else read_vocabulary(config.vocabulary.folder).base_tokenizer
        )
        training = TrainingSamples(
            config.data,
            seed=config.seed,
            tokenizer_fingerprint=fingerprint,
            sampled_fingerprint=sampled,
        )
        needed = config.schedule.steps * config.schedule.global_batch_size
        if training.total is not None and training.total < needed:
            raise DataError(
                f"schedule.steps: {config.schedule.steps} steps need {needed} sequences, but the corpora's epochs and "
                f"token budgets end after {training.total}; "
                f"use at most {training.total // config.schedule.global_batch_size} steps"
            )
        return Samples(training, load_heldout(config.data, tokenizer_fingerprint=fingerprint))

    @cached_property
    def finished(self) -> bool:
        """Whether an earlier attempt finished the run, which is logged. The checkpoints' files are not read.

        A newest checkpoint of another base, base_precision or method, or, unless the run is finished, of other data, is
        a CheckpointError; so is a run whose records say that it had checkpoints, where there is none.
        """
        config = self.config
        for checkpoint in candidates(config.checkpoint_folder):
            try:
                manifest = load_manifest(checkpoint)
            except DamagedCheckpointError:
                continue  # resuming reports it, and takes the one before
            with torch.device("meta"):
                model = build_model(config, self.base.spec, SINGLE)
            finished = (
                is_trained(config.folder) and manifest.position.step >= config.schedule.steps
            )  # none were added
            samples = (
                None if finished else self.get("samples")
            )  # a finished run needs its corpora no more
            contents = None if samples is None else samples.contents
            run = describe_run(config, self.base, model, self.tokenizer_fingerprint, contents)
            check_same_run(manifest, checkpoint, run, SAME_MODEL if finished else SAME_OVER_A_RUN)
            if finished:
                _logger.info(
                    "%s is trained to step %d: nothing to train",
                    config.folder,
                    manifest.position.step,
                )
            return finished
        check_no_checkpoint_is_lost(config)
        return False

    @cached_property
    def starts_at_base(self) -> bool:
        """Whether the model's logits must equal the base's before the first step."""
        return (
            self.finished or self.method.expansion is None or not self.method.expansion.is_trained
        )


def check_no_checkpoint_is_lost(config: RunConfig) -> None:
    """Raises CheckpointError where a run had checkpoints, and nothing of them is left.

    It would begin again at step 0, and its figures so far would be lost. Damaged checkpoints are reported where a run
    resumes.
    """
    folder, checkpoints = config.folder, config.checkpoint_folder
    if any(checkpoints.glob("step_*")) or named_checkpoint(checkpoints) is not None:
        return
    kept = [name for name in (TRAINING, METRICS) if (folder / name).exists()]
    saved = max((attempt.newest_checkpoint_step for attempt in read_attempts(folder)), default=0)
    if is_trained(folder):
        found = f"{folder / TRAINING} says that the run is trained"
    elif kept and saved:
        found = f"{folder / ATTEMPTS} says that the run was saved at step {saved}"
    else:
        return
    raise CheckpointError(
        f"{checkpoints}: holds no checkpoint, but {found}; put the checkpoints back, or, to train from step 0, move "
        f"{' and '.join(kept)} away or name another `folder` in the configuration"
    )


def check_fits(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where the run's method, layout or sequence length does not fit a base of that architecture.

    It builds the model without memory or communication.
    """
    longest, parallel = spec.max_position_embeddings, config.parallel
    if config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is beyond the base's context of {longest} tokens; "
            f"use at most {longest}"
        )
    with torch.device("meta"):
        build_model(
            config,
            spec,
            imagined_ranks(
                parallel.tp_size, Counter(), sequence_parallel=parallel.sequence_parallel
            ),
        )
