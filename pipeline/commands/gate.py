"""Fits the gate of a finished run, which decides per token whether the text is new.

    scale-cpt gate run.yaml

Reads the section `gate` of the configuration and the run's newest checkpoint; writes `<folder>/gate`, and prints how
much of each held-out corpus opens and what that does to its perplexity. A gate that is fitted already is only shown.
A configuration without the section has nothing to fit.
"""

from __future__ import annotations

import argparse

from pipeline import command_line, log
from pipeline.config.run import load_config
from pipeline.run_folder.attempts import stage_of
from pipeline.run_folder.run_file import write_run

logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)


def main(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set)
    if config.gate is None:
        logger.info("the configuration has no section gate: nothing to fit")
        return
    with stage_of(config, "gate", alone=True):
        # Imported after the configuration is checked: a mistake in it is reported at once.
        from pipeline.gating.fit_run import as_text, fit_gate
        from pipeline.gating.folder import GATE_FOLDER

        record, is_new = fit_gate(config)
        write_run(config)  # a gate may be added to a finished run, and is exported with it
        print(as_text(record))
        logger.info(
            "%s %s", config.folder / GATE_FOLDER, "is written" if is_new else "is already fitted"
        )
