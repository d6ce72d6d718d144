"""Computes the initial expansion of a base model, once, for any parallel layout.

    scale-cpt upscale configs/demo.yaml

Reads the run's `base`, `method` and `seed`; writes <folder>/initial_expansion. An expansion that
exists and is intact is kept.

Before that, the base's logits on a probe text are compared with those of transformers, in fp32: of
all layers, or of the first layers that fit into 8 GiB.
"""

from __future__ import annotations

import argparse

from pipeline import command_line, log
from pipeline.config.method import Lora, ScaleMethod, recorded_method, starts_from_expansion
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import CheckpointError
from pipeline.files.json_files import read_object
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step
from pipeline.run_folder.serial_stage import serial_stage

MANIFEST = "manifest.json"
"""The name of an expansion's manifest; the module that writes it loads torch."""

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)


def main(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set)
    with serial_stage(config, "upscale", locked=True):
        _upscale(config)


def _upscale(config: RunConfig) -> None:
    output = config.initial_expansion_folder
    method = config.method
    if not starts_from_expansion(method):
        _logger.info("method %s widens nothing: nothing to upscale", method.name)
        return
    # Every restart of a run passes here: it must take no time.
    if newest_checkpoint_step(config.folder) and _seems_made_for(config, method):
        _logger.info("%s is there already, and training has begun", output)
        return
    _logger.info("upscaling %s: loading the libraries, then the base", config.base)
    # After the configuration is checked, so that a mistake in it is reported at once.
    from pipeline.data.tokenizer.load import load_tokenizer
    from pipeline.methods.own_tokens import own_tokens_of
    from pipeline.methods.scale import made_expansion, upscale
    from pipeline.model.bases import open_base
    from pipeline.scale.plan import plan_expansion

    base = open_base(config.base, config.base_code)
    expansion = made_expansion(config, base)
    if expansion is not None:
        expansion.check_files()
        _logger.info("%s is there already", output)
        return
    from pipeline.checks.parity import check_against_transformers  # Half of all imports.

    # Faults of the method are found before the slow comparison.
    plan_expansion(method, base.spec.widths, base.spec.num_layers)
    if base.spec.is_native:
        # Where transformers itself computes a base, there is no second reading of it.
        check_against_transformers(base)
    own_tokens = own_tokens_of(
        config,
        base.spec.vocab_size,
        tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint,
    )
    upscale(method, base, output, config.seed, own_tokens)
    _logger.info("wrote the initial expansion to %s", output)


def _seems_made_for(config: RunConfig, method: ScaleMethod | Lora) -> bool:
    """Whether the expansion names this base, method and seed, and is newer than the base.

    That takes no time and no torch. Only if it does not hold are all weights hashed, as training
    does in any case.
    """
    manifest = config.initial_expansion_folder / MANIFEST
    try:
        found = read_object(manifest, CheckpointError)
        recorded = found.get("method")
        made_with = recorded_method(recorded) if isinstance(recorded, dict) else None
        made_at = manifest.stat().st_mtime
        base_changed_at = max(file.stat().st_mtime for file in config.base.iterdir())
    except (OSError, ValueError, CheckpointError):
        return False  # The checks that follow say why.
    return (
        found.get("base") == str(config.base)
        # A base that was changed after the expansion was made may be another one; its times answer
        # without reading it.
        and base_changed_at <= made_at
        and made_with == method.initial_expansion_settings
        and found.get("seed") == config.seed
    )
