"""Fits the gate of a finished run, which decides per token whether the text is new.

    scale-cpt gate configs/demo.yaml
    scale-cpt gate runs/demo

Reads the section `gate` of the configuration and the run's newest checkpoint. Writes <folder>/gate,
and prints on how much of each held-out corpus the gate opens, and what that does to its perplexity.
A gate that is fitted already is only shown. A configuration without the section has nothing to fit
(docs/gate.md).
"""

from __future__ import annotations

import argparse

from pipeline import command_line, log
from pipeline.config.run import load_config
from pipeline.run_folder.run_file import write_gate
from pipeline.run_folder.serial_stage import serial_stage
from pipeline.run_folder.status import unfinished_progress

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)


def main(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set)
    if config.gate is None:
        _logger.info("the configuration has no section gate: nothing to fit")
        return
    progress = unfinished_progress(config.folder)
    if progress is not None:
        _logger.info("%s: the run is not finished", progress)
    _logger.info("the gate of %s: loading the libraries, then the checkpoint", config.folder)
    # Under a lock: two fits would write the same folder.
    with serial_stage(config, "gate", locked=True):
        # After the configuration is checked, so that a mistake in it is reported at once.
        from pipeline.extensions.gate.fit_run import fit_gate
        from pipeline.extensions.gate.table import as_text
        from pipeline.gating.folder import GATE_FOLDER
        from pipeline.gating.open_old_text import warn_of_open_old_text

        record, is_new = fit_gate(config)
        # A gate may be added to a finished run, and is exported with it.
        write_gate(config)
        print(as_text(record))
        warn_of_open_old_text(record, config.gate.max_open_fraction)
        done = "is written" if is_new else "is already fitted"
        _logger.info("%s %s", config.folder / GATE_FOLDER, done)
