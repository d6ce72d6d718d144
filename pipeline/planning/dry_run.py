"""`python -m pipeline.train --dry-run`: prints the plan of a run, and says by its exit code whether it could start."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime

from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.estimation.options import cluster_of
from pipeline.planning.plan import make_plan
from pipeline.planning.text import as_text, as_values


def dry_run(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.config` on the cluster that `arguments` describe. Returns 1 where it could not
    start.

    Raises:
        ConfigError: the configuration itself is faulty, or the number of ranks is not given.
    """
    if "gpus" not in arguments:
        raise ConfigError("--dry-run: say for how many ranks, with --gpus")
    config = load_config(arguments.config)
    plan = make_plan(config, cluster_of(arguments), arguments.base_config)
    now = datetime.now().astimezone()
    text = json.dumps(as_values(plan, now), indent=2) if arguments.json else as_text(plan, now)
    sys.stdout.write(text + "\n")
    return 1 if plan.faults else 0
