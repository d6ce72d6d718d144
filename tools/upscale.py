"""Computes the initial expansion of a base model, once, for training on any layout.

    scale-cpt upscale configs/demo.yaml

Reads the run's `base`, `method` and `seed`; writes `<folder>/upscaled`. Skips an expansion that exists and is intact.
Before that, the base's logits on a probe text are compared with those of transformers, in fp32: of all its layers, or
of the first that fit into 8 GiB.
"""

from __future__ import annotations

import argparse

from pipeline import command_line, log
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config
from pipeline.run_folder.attempts import stage_of
from pipeline.run_folder.checkpoint_names import newest_checkpoint_step

logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)


def main(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set)
    with stage_of(config, "upscale", alone=True):
        _upscale(config)


def _upscale(config: RunConfig) -> None:
    output = config.upscaled_folder
    if not isinstance(config.method, ScaleMethod):
        logger.info("method %s widens nothing: nothing to upscale", config.method.name)
        return
    if newest_checkpoint_step(config.folder) and output.is_dir():  # every restart of a run passes here
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
    from pipeline.conversion.parity import check_against_transformers  # half of all imports

    plan_expansion(config.method, base.spec.widths, base.spec.num_layers)  # its faults come before slow checks
    check_against_transformers(base)
    upscale(config.method, base, output, config.seed)
    logger.info("wrote the initial expansion to %s", output)


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
