"""Computes the initial expansion of a base model, once, for any parallel layout.

    scale-cpt upscale configs/demo.yaml

Reads the run's `base`, `method` and `seed`; writes `<folder>/initial_expansion`. Skips an expansion that exists and is intact.
Before that, the base's logits on a probe text are compared with those of transformers, in fp32: of all its layers, or
of the first that fit into 8 GiB.
"""

from __future__ import annotations

import argparse

from pipeline import command_line, log
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import CheckpointError
from pipeline.files import read_object
from pipeline.run_folder.attempts import stage_of
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step

MANIFEST = "manifest.json"
"""Of an expansion; the module that writes it loads torch."""
logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)


def main(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set)
    with stage_of(config, "upscale", alone=True):
        _upscale(config)


def _upscale(config: RunConfig) -> None:
    output = config.initial_expansion_folder
    if not isinstance(config.method, ScaleMethod):
        logger.info("method %s widens nothing: nothing to upscale", config.method.name)
        return
    if newest_checkpoint_step(config.folder) and _seems_made_for(
        config
    ):  # every restart of a run passes here
        logger.info("%s is there already, and training has begun", output)
        return
    # Imported after the configuration is checked: a mistake in it is reported at once.
    from pipeline.methods.scale import made_expansion, upscale
    from pipeline.model.from_hf import open_base
    from pipeline.scale.plan import plan_expansion

    base = open_base(config.base)
    if (expansion := made_expansion(config, base)) is not None:
        expansion.check_files()
        logger.info("%s is there already", output)
        return
    from pipeline.checks.parity import check_against_transformers  # half of all imports

    plan_expansion(
        config.method, base.spec.widths, base.spec.num_layers
    )  # its faults come before slow checks
    check_against_transformers(base)
    upscale(config.method, base, output, config.seed)
    logger.info("wrote the initial expansion to %s", output)


def _seems_made_for(config: RunConfig) -> bool:
    """Whether the expansion in the run's folder names this base, method and seed, and the base is older than it.

    That takes no time and no torch. Only if it does not hold are all weights hashed, as training does in any case.
    """
    manifest = config.initial_expansion_folder / MANIFEST
    try:
        found = read_object(manifest, CheckpointError)
        newest = max(file.stat().st_mtime for file in config.base.iterdir())
    except (OSError, ValueError, CheckpointError):  # said in full by the checks that follow
        return False
    assert isinstance(config.method, ScaleMethod), "others have no expansion"
    same_base = found.get("base") == str(config.base) and newest <= manifest.stat().st_mtime
    same_method = found.get("method") == config.method.of_initial_expansion
    return same_base and same_method and found.get("seed") == config.seed
