r"""Converts a checkpoint to a Hugging Face folder, and verifies it.

    scale-cpt convert configs/demo.yaml
    scale-cpt convert configs/demo.yaml --format merged --without-gate --output exported
    scale-cpt convert --checkpoint runs/demo/checkpoints/step_00000200 \
        --base examples/data/models/stories260K --output exported --format merged --dtype bf16

With a run, its newest checkpoint is converted, into <folder>/hf or --output. The folder appears
once its logits are verified to be those of the model that trained.

Format `merged` loads anywhere, with no code of ours. Format `scale` carries its code
(trust_remote_code=True). Format `difference`, of full fine-tuning with a gate, holds the base and
what training changed, in --bits bits. Format `expansion` holds only what SCALE added. Format `peft`
is an adapter that PEFT loads onto the base, of a run of method lora. Format `auto` is
merged where possible, else difference or scale. A run whose configuration has a section `gate` is
converted with its gate, into the format `scale` or `difference`, or --without-gate; `expansion` has
no gate either way.

A wider merged model in fp32 is stored for serving: its added channels are too small for other tools
to train. With `--for training` they can, and its logits differ a little more from the model that
trained. With `--tensor-parallel-size 8` its widths are padded with zeros to what servers split over
8 GPUs.

Nothing leaves this machine. To publish the folder: `hf upload organisation/model FOLDER`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pipeline import command_line, log
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion import AUTO, Precision, Purpose, offered_formats
from pipeline.errors import ConfigError
from pipeline.extension import FormatOption
from pipeline.run_folder.serial_stage import serial_stage
from pipeline.run_folder.status import unfinished_progress

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser, required=False)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="without a run: a checkpoint, such as runs/demo/checkpoints/step_00000200",
    )
    parser.add_argument(
        "--base",
        type=command_line.folder_or_hub,
        help="with --checkpoint: the base model's folder",
    )
    parser.add_argument(
        "--gate", type=Path, help="with --checkpoint: the gate's folder, such as runs/demo/gate"
    )
    parser.add_argument("--without-gate", action="store_true", help="leave the run's gate out")
    parser.add_argument(
        "--vocabulary", type=Path, help="the extended vocabulary's folder, if it has moved"
    )
    parser.add_argument(
        "--output", type=Path, help="the folder to make (default: <folder>/hf of the run)"
    )
    command_line.add_overwrite_option(parser)
    parser.add_argument(
        "--format",
        type=_format,
        choices=(AUTO, *offered_formats()),
        default=AUTO,
        help="see above (default: auto)",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Precision),
        help="the type of the stored weights (default: the base's; fp32 for an adapter, and with a "
        "hosted base of which transformers keeps parameters in fp32)",
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=get_args(Purpose),
        default="serving",
        help="training: other tools can train a wider merged model in fp32 (default: serving)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        choices=(1, 2, 4, 8),
        default=1,
        help="pad a wider merged model with zeros so that servers can split it over this many GPUs",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="documents to verify on: JSONL, .txt, .zst, ... (default: the run's held-out texts)",
    )
    for offered in offered_formats().values():
        for option in offered.options:
            parser.add_argument(
                option.flag,
                dest=option.name,
                type=option.parse,
                choices=option.choices or None,
                help=option.help,
            )


def _format(text: str) -> str:
    """The option --format; the name that a format had in earlier versions is told the new one."""
    if text == "stock":
        raise argparse.ArgumentTypeError("expected merged, which stock is called now, found stock")
    return text


def main(arguments: argparse.Namespace) -> None:
    _check(arguments)
    config = load_config(arguments.run, arguments.set) if arguments.run else None
    with serial_stage(config, "convert", locked=True):
        _convert(config, arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where the options do not fit together."""
    if arguments.run:
        fits = not (arguments.checkpoint or arguments.base or arguments.gate)
    else:
        fits = bool(arguments.checkpoint and arguments.base and arguments.output)
    if not fits:
        raise ConfigError(
            "name a run, or --checkpoint with --base, --output and, for a gate, --gate"
        )
    if arguments.without_gate and not arguments.run:
        raise ConfigError(
            "--without-gate belongs to a run; with --checkpoint a gate is only taken by --gate"
        )
    for name, offered in offered_formats().items():
        asked = [option.flag for option in offered.options if _is_given(arguments, option)]
        if asked and arguments.format not in (AUTO, name):
            raise ConfigError(
                f"{' and '.join(asked)}: expected --format {name}, found --format "
                f"{arguments.format}; remove one of them"
            )


def _format_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of single formats that are given, by name."""
    options: dict[str, Any] = {}
    for offered in offered_formats().values():
        for option in offered.options:
            if _is_given(arguments, option):
                options[option.name] = getattr(arguments, option.name)
    return options


def _is_given(arguments: argparse.Namespace, option: FormatOption) -> bool:
    return getattr(arguments, option.name) is not None


def _convert(config: RunConfig | None, arguments: argparse.Namespace) -> None:
    converted = arguments.checkpoint if config is None else config.folder
    _logger.info("converting %s: loading the libraries, then the checkpoint", converted)
    # After the arguments and the configuration are checked, so that a mistake is reported at once.
    from pipeline.conversion.convert import (
        TYPES,
        convert,
        latest_conversion,
        run_sources,
    )
    from pipeline.conversion.probe_texts import probe_maker
    from pipeline.conversion.request import Conversion
    from pipeline.data.sources.records import Keys
    from pipeline.hf.served_tokenizer import texts_of

    sources: dict[str, list[str]] = {}
    keys: dict[str, Keys] = {}
    if config is not None:
        conversion = latest_conversion(config)
        progress = unfinished_progress(config.folder)
        if progress is not None:
            _logger.info("%s: the run is not finished", progress)
        sources, keys = run_sources(config)
    else:
        conversion = Conversion(
            arguments.checkpoint, arguments.base, arguments.output, gate=arguments.gate
        )
    if arguments.text:
        sources = {path.name: [str(path)] for path in arguments.text}
        keys = {}
    if arguments.without_gate:
        if conversion.gate is not None:
            _logger.warning(
                "without its gate the model uses what was trained on every token, so old text "
                "changes too; scale-cpt evaluate --model with --data measures how much "
                "(docs/self_generated.md)"
            )
        conversion = replace(conversion, gate=None)
    conversion = replace(
        conversion,
        output=arguments.output or conversion.output,
        format=arguments.format,
        dtype=TYPES[arguments.dtype] if arguments.dtype else None,
        vocabulary=arguments.vocabulary or conversion.vocabulary,
        overwrite=arguments.overwrite,
        purpose=arguments.purpose,
        tp_size=arguments.tensor_parallel_size,
        options=_format_options(arguments),
    )
    is_new = convert(conversion, probe_maker(sources, keys), texts_of(sources, keys))
    _logger.info("wrote %s" if is_new else "%s: already converted", conversion.output)
