r"""Converts a checkpoint to a Hugging Face folder, and verifies it.

    scale-cpt convert configs/demo.yaml
    scale-cpt convert configs/demo.yaml --format merged --without-gate --output exported
    scale-cpt convert --checkpoint runs/demo/checkpoints/step_00000200 --base examples/data/models/stories260K \
        --output exported --format merged --dtype bf16

With a run: the run's newest checkpoint, into <folder>/hf or --output. Formats: `merged` loads anywhere with no code
of ours; `scale` carries its code (trust_remote_code=True); `expansion` holds only what SCALE added; `auto` is merged
where possible. A run whose configuration has a section `gate` is converted with its gate, into the format `scale`, or
--without-gate.

A wider merged model in fp32 is stored for serving, with the added channels too small for other tools to train. With
`--for training` they can, and it differs a little more from the model that trained.

Nothing leaves this machine: to publish the folder, `hf upload organisation/model FOLDER`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pipeline import command_line, log
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion import Format, Precision, Purpose
from pipeline.errors import ConfigError
from pipeline.run_folder.attempts import stage_of

logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser, required=False)
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder such as runs/demo/checkpoints/step_00000200"
    )
    parser.add_argument(
        "--base",
        type=command_line.folder_or_hub,
        help="the folder of the model that was trained on",
    )
    parser.add_argument(
        "--vocabulary", type=Path, help="the extended vocabulary's folder, if it has moved"
    )
    parser.add_argument(
        "--gate", type=Path, help="the folder of the checkpoint's gate, such as runs/demo/gate"
    )
    parser.add_argument("--without-gate", action="store_true", help="leave the run's gate out")
    parser.add_argument(
        "--output", type=Path, help="the folder to make (default: <folder>/hf of the run)"
    )
    command_line.add_overwrite_option(parser)
    parser.add_argument("--format", type=_format, choices=get_args(Format), default="auto")
    parser.add_argument("--dtype", choices=get_args(Precision), help="default: the base's")
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=get_args(Purpose),
        default="serving",
        help="of a wider merged model in fp32: whether other tools are to train it (default: serving)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        help="documents to verify on (JSONL, .txt, .zst …)",
    )


def _format(text: str) -> str:
    """The option --format; the name that a format had in earlier versions is told the new one."""
    if text == "stock":
        raise argparse.ArgumentTypeError("expected merged, which stock is called now, found stock")
    return text


def main(arguments: argparse.Namespace) -> None:
    named = (arguments.checkpoint, arguments.base)
    if any((*named, arguments.gate)) if arguments.run else not all((*named, arguments.output)):
        raise ConfigError(
            "name a run, or --checkpoint with --base, --output and, for a gate, --gate"
        )
    if arguments.without_gate and not arguments.run:
        raise ConfigError(
            "--without-gate belongs to a run; with --checkpoint a gate is only taken by --gate"
        )
    config = load_config(arguments.run, arguments.set) if arguments.run else None
    with stage_of(config, "convert", alone=True):
        _convert(config, arguments)


def _convert(config: RunConfig | None, arguments: argparse.Namespace) -> None:
    # Imported after the arguments and the configuration are checked: a mistake in them is reported at once.
    from pipeline.conversion.convert import (
        TYPES,
        Conversion,
        convert,
        latest_conversion,
        run_sources,
    )
    from pipeline.conversion.verify import probe_maker
    from pipeline.hf.served_tokenizer import texts_of

    if config is not None:
        conversion, (sources, keys) = latest_conversion(config), run_sources(config)
    else:
        conversion = Conversion(
            arguments.checkpoint, arguments.base, arguments.output, gate=arguments.gate
        )
        sources, keys = {}, {}
    if arguments.text:
        sources, keys = {path.name: [str(path)] for path in arguments.text}, {}
    conversion = replace(
        conversion,
        output=arguments.output or conversion.output,
        format=arguments.format,
        dtype=TYPES[arguments.dtype] if arguments.dtype else None,
        gate=None if arguments.without_gate else conversion.gate,
        vocabulary=arguments.vocabulary or conversion.vocabulary,
        overwrite=arguments.overwrite,
        purpose=arguments.purpose,
    )
    is_new = convert(conversion, probe_maker(sources, keys), texts_of(sources, keys))
    logger.info("wrote %s" if is_new else "%s: already converted", conversion.output)
