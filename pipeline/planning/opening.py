"""Opens what a run names, as far as it is there: the checks that need neither ranks nor tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.estimation.micro_batch import imagined_ranks
from pipeline.methods.scale import check_named_expansion
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout, TensorParallel
from pipeline.planning.faults import Faults
from pipeline.training.inputs import check_context, check_model, check_vocabulary, open_layout


@dataclass(frozen=True)
class Opened:
    """What could be opened; None where it could not."""

    layout: Layout | None
    deepspeed: DeepSpeedConfig | None
    spec: DecoderSpec | None
    tokenizer: Tokenizer | None


def open_run(config: RunConfig, world_size: int, faults: Faults, base_config: Path | None = None) -> Opened:
    """Opens layout, DeepSpeed file, base and its tokenizer for `world_size` ranks, and notes in `faults` what is wrong.

    `base_config` is the base's config.json, for figures of a base that is not here.
    """
    arranged = faults.attempt(lambda: open_layout(config, world_size))
    base = faults.attempt(lambda: open_base(config.base))
    if base is not None:
        faults.attempt(lambda: base.file_of)  # every weight file's header
    spec = base.spec if base is not None else None
    if spec is None and base_config is not None:
        spec = faults.attempt(lambda: read_spec(base_config))
    if spec is not None:
        faults.attempt(lambda: check_context(config, spec))
        faults.attempt(lambda: check_model(config, spec, _imagined(config)))
    if isinstance(config.method, ScaleMethod):
        faults.attempt(lambda: check_named_expansion(config.upscaled))
    # That there is no base is said above.
    tokenizer = faults.attempt(lambda: load_tokenizer(config.base)) if config.base.exists() else None
    if spec is not None and tokenizer is not None:
        faults.attempt(lambda: check_vocabulary(tokenizer, spec))
    layout, deepspeed = arranged or (None, None)
    return Opened(layout, deepspeed, spec, tokenizer)


def check_fits(config: RunConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError where the run's method or samples do not fit a base of that architecture."""
    check_context(config, spec)
    check_model(config, spec, _imagined(config))


def _imagined(config: RunConfig) -> TensorParallel:
    parallel = config.parallel
    return imagined_ranks(parallel.tp_size, [], sequence_parallel=parallel.sequence_parallel)


def check_before_tokenizing(config: RunConfig, world_size: int | None) -> None:
    """What would stop the training, found before the hours of tokenizing.

    `world_size` is None where the ranks that will train are not known yet: then it is looked at for one
    tensor-parallel group of them.

    Raises:
        UserError: with every fault.
    """
    faults = Faults()
    open_run(config, world_size or config.parallel.tp_size, faults)
    faults.raise_all()
