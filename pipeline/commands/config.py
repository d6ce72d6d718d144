"""Shows every setting of a run, or writes a first configuration.

    scale-cpt config show configs/demo_fft.yaml --set schedule.steps=20
    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl --gpus 8

With `show`, the groups of parameters, each with its learning rate and weight decay, follow as
comments. With `init`, the configuration is made for --gpus GPUs, or else for this machine, and its
dry run is printed too.
"""

from __future__ import annotations

import argparse
from importlib import import_module

import yaml

from pipeline import command_line
from pipeline.commands import subcommands
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import UserError
from pipeline.installation import locate_docs
from pipeline.log import get_logger

_logger = get_logger(__name__)
_SHOW = """\
Print every setting of a run: its file, the files that it extends, and --set.

    scale-cpt config show configs/demo.yaml --set schedule.steps=20"""


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show",
        help="print every setting of a run: its file, the files that it extends, and --set",
        description=_SHOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_run(show)
    show.set_defaults(main_of_command=_show)
    for name, command in subcommands("config").items():
        module = import_module(command.module)
        added = commands.add_parser(
            name,
            help=command.summary.replace("%", "%%"),
            description=locate_docs(module.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(added)
        added.set_defaults(main_of_command=module.main)


def main(arguments: argparse.Namespace) -> int | None:
    code: int | None = arguments.main_of_command(arguments)
    return code


def _show(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.run, arguments.set, base="named")
    values = config.model_dump(mode="json")
    groups = _group_lines(config)
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    for line in groups:
        print(f"# {line}".rstrip())
    return 0


def _group_lines(config: RunConfig) -> list[str]:
    """The table of groups of parameters, or why it is not known here.

    Raises:
        ConfigError: a factor of the schedule is for parameters that are not there.
    """
    if not config.base.is_dir():
        return [
            f"groups of parameters: unknown, because {config.base} is not on this machine; "
            "see scale-cpt train --dry-run --base-config"
        ]
    _logger.info("groups of parameters: loading the libraries")
    # After the configuration is checked, because torch takes seconds.
    from pipeline.checks.inputs import RunInputs
    from pipeline.methods.parameter_groups import group_lines

    inputs = RunInputs(config, world_size=config.parallel.fewest_ranks)
    try:
        _ = inputs.fitting_spec
    except UserError as error:
        return [f"groups of parameters: unknown: {error}"]
    return ["groups of parameters:", *group_lines(inputs.parameter_groups)]
