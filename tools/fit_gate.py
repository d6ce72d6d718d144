"""Fits the gate of a finished run, which decides per token whether the text is new (docs/gate.md).

    scale-cpt gate --config run.yaml

Reads the section `gate` of the configuration and the run's newest checkpoint; writes `<folder>/gate`, and prints how
much of each held-out corpus opens and what that does to its perplexity. A gate that is fitted already is only shown.
A configuration without the section has nothing to fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line, log
from pipeline.config.run import RunConfig
from pipeline.run_folder.attempts import stage_of
from pipeline.run_folder.changes import add_set_option, read_run

logger = log.get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    add_set_option(parser)
    arguments = parser.parse_args()

    config = read_run(arguments.config, arguments.set)
    if config.gate is None:
        logger.info("the configuration has no section gate: nothing to fit")
        return
    with stage_of(config, "gate", changes=arguments.set, alone=True):
        _fit(config)


def _fit(config: RunConfig) -> None:
    # Imported after the configuration is checked: a mistake in it is reported at once.
    from pipeline.gating.fit_run import fit_gate
    from pipeline.gating.table import as_text
    from pipeline.scale.gate_folder import GATE_FOLDER

    record, is_new = fit_gate(config)
    print(as_text(record))
    logger.info("%s %s", config.folder / GATE_FOLDER, "is written" if is_new else "is already fitted")


if __name__ == "__main__":
    command_line.run(main)
