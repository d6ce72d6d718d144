"""The checks of a run's configuration and files. They need no ranks and no GPU.

A check is a function of the run's inputs. It raises a UserError, or returns a list of them if it
looks at several things. Many checks only read a property of `RunInputs`, which opens and checks a
file that the configuration names. `pipeline.checks.checklist` lists who makes which check.
"""

from __future__ import annotations

from importlib.util import find_spec

from pipeline import log
from pipeline.checkpoint.manifest import check_continues_function
from pipeline.checks.inputs import RunInputs
from pipeline.config.method import Lora, ScaleMethod, starts_from_expansion
from pipeline.conversion.formats import unsupported_reasons
from pipeline.data.tokenize import job as tokenize_job
from pipeline.data.tokenize.corpora import check_heldout, corpus_jobs, is_tokenized, named_inputs
from pipeline.data.tokenize.corpus_folder import finished
from pipeline.data.tokenize.input_files import input_files, is_here
from pipeline.errors import ConfigError, MissingPackageError, UserError
from pipeline.expansion_folder import MANIFEST as EXPANSION_MANIFEST
from pipeline.expansion_folder import open_expansion
from pipeline.hf.base_files import base_config
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.served_tokenizer import check_future_export
from pipeline.methods.own_tokens import check_min_count
from pipeline.methods.scale import check_named_expansion, made_expansion
from pipeline.methods.vocabulary import check_vocabulary
from pipeline.run_folder.lock import check_folder
from pipeline.scale.plan import plan_expansion

_logger = log.get_logger(__name__)

# --- The configuration ----------------------------------------------------------------------------


def check_layout(inputs: RunInputs) -> None:
    """tp_size divides the number of ranks, and the data-parallel ranks divide the batch."""
    _ = inputs.layout


def check_deepspeed_config(inputs: RunInputs) -> None:
    """DeepSpeed's JSON can be read, and agrees with the run's YAML."""
    _ = inputs.deepspeed_config


def check_profile(inputs: RunInputs) -> None:
    """The ranks that `profile` names exist.

    Raises:
        ConfigError: one of them does not.
    """
    profile = inputs.config.profile
    if profile.steps is None or not profile.ranks:
        return
    world_size = inputs.layout.world_size
    if max(profile.ranks) >= world_size:
        raise ConfigError(
            f"profile.ranks: found rank {max(profile.ranks)}, expected ranks from 0 to "
            f"{world_size - 1}"
        )


def check_trackers(inputs: RunInputs) -> None:
    """The packages of the trackers that `observers` names are installed.

    Raises:
        MissingPackageError: one is not installed.
    """
    for name in ("wandb", "mlflow"):
        if getattr(inputs.config.observers, name) is not None and find_spec(name) is None:
            raise MissingPackageError(
                f"observers.{name}: the package is missing; pip install 'scale-cpt[{name}]', "
                "or remove the section"
            )


def check_flash_attention(inputs: RunInputs) -> None:
    """FlashAttention 4 is installed and fits, where `flash_attention` asks for it."""
    _ = inputs.flash_attention


def check_heldout_texts(inputs: RunInputs) -> None:
    """The run has held-out text to score."""
    check_heldout(inputs.config)


# --- The base and the tokenizer -------------------------------------------------------------------


def check_base(inputs: RunInputs) -> None:
    """The base's folder can be read, with the header of every weight file; what config.json ties
    is equal in them."""
    _ = inputs.base.file_of
    inputs.base.check_tie()


def check_model(inputs: RunInputs) -> None:
    """The method, the layout and the sequence length fit the base's architecture."""
    _ = inputs.fitting_spec


def check_parameter_groups(inputs: RunInputs) -> None:
    """The factors of learning rates and weight decays match parameters that train."""
    if inputs.get_or_none("fitting_spec") is None:
        return  # A check of its own reports it.
    _ = inputs.parameter_groups


def check_tokenizer(inputs: RunInputs) -> None:
    """The tokenizer can be read, and the base has an embedding row for each of its ids."""
    check_vocabulary(inputs.tokenizer, inputs.spec)


def check_exported_tokenizer(inputs: RunInputs) -> None:
    """An export's AutoTokenizer will have the same ids as the tokenizer of training."""
    spec = inputs.get_or_none("fitting_spec")
    tokenizer = inputs.get_or_none("tokenizer")
    if spec is None or tokenizer is None:
        return  # Checks of their own report it.
    config = inputs.config
    expansion = None
    if isinstance(config.method, (ScaleMethod, Lora)):
        expansion = plan_expansion(config.method, spec.widths, spec.num_layers)
    refused = unsupported_reasons(config.method, expansion, spec, gated=config.gate is not None)
    # Format `auto` is merged where possible, and a merged export has the base's own model_type.
    model_type = ScaleConfig.model_type
    if refused["merged"] is None and config.base.is_dir():
        model_type = str(base_config(config.base)["model_type"])
    check_future_export(config.tokenizer, tokenizer, model_type, inputs.compared_texts)


# --- Texts and token corpora ----------------------------------------------------------------------


def check_texts(inputs: RunInputs) -> list[UserError]:
    """The texts exist, and corpora that were begun are those of the configuration.

    Texts on the hub are left to tokenization.
    """
    faults: list[UserError] = []
    config = inputs.config
    tokenizer = inputs.get_or_none("tokenizer")
    if tokenizer is None:
        for patterns in named_inputs(config.data):
            try:
                if is_here(patterns):
                    input_files(patterns)
            except UserError as fault:
                faults.append(fault)
        return faults
    for job in corpus_jobs(config.data, config.tokenizer):
        try:
            if is_here(job.corpus.input):
                finished(job.output, tokenize_job.plan_of(job, tokenizer))
        except UserError as fault:
            faults.append(fault)
    return faults


def check_open_rows(inputs: RunInputs) -> None:
    """Some token of the new text is frequent enough to have a row of its own."""
    spec = inputs.get_or_none("spec")
    tokenizer = inputs.get_or_none("tokenizer")
    if spec is None or tokenizer is None or check_texts(inputs):
        return  # Checks of their own report it.
    is_made = (inputs.config.initial_expansion_folder / EXPANSION_MANIFEST).exists()
    if not is_made:
        check_min_count(inputs.config, spec.vocab_size, tokenizer)


def check_samples(inputs: RunInputs) -> None:
    """The token corpora are complete, of the run's tokenizer, and last to the end of the run."""
    _ = inputs.samples


def check_samples_or_folder(inputs: RunInputs) -> None:
    """The token corpora, if they are made; if not, that their folder can be written to."""
    config = inputs.config
    if is_tokenized(config.data):
        check_samples(inputs)
    elif config.data.folder.resolve() != config.folder.resolve():
        check_folder(config.data.folder)


# --- The run's folder: what earlier stages and attempts have left ---------------------------------


def check_run_folder(inputs: RunInputs) -> None:
    """The run's folder can be written to, and no other process works in it."""
    check_folder(inputs.config.folder)


def check_initial_expansion(inputs: RunInputs) -> None:
    """An expansion that exists is the one that the configuration describes, on this base."""
    if starts_from_expansion(inputs.config.method):
        check_named_expansion(inputs.config.init_expansion)
    # It compares the hashes of the base's files, which takes a while for a large base.
    made_expansion(inputs.config, inputs.base)


def check_trained_expansion(inputs: RunInputs) -> None:
    """An expansion that was trained before computes in this run what it was trained to."""
    folder = inputs.config.init_expansion
    if folder is None or inputs.get_or_none("base") is None:
        return  # A missing base is reported by `check_base`.
    check_named_expansion(folder)
    expansion = open_expansion(folder)
    if expansion.is_trained and expansion.manifest.trained_as is None:
        _logger.info(
            "%s: an earlier version exported it without a record of method.norm, "
            "method.router_threshold and base_precision: not compared",
            folder,
        )
    check_continues_function(expansion, inputs.config, inputs.base.spec)


def check_start(inputs: RunInputs) -> None:
    """The newest checkpoint is one of this run; where there is none, the expansion is whole."""
    _ = inputs.starts_at_base


def check_newest_checkpoint(inputs: RunInputs) -> None:
    """The newest checkpoint, if any, is one of this run."""
    if inputs.get_or_none("fitting_spec") is None or inputs.get_or_none("base") is None:
        return  # Checks of their own report it.
    if inputs.config.folder.is_dir():
        _ = inputs.finished
