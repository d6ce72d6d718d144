r"""Turns a training checkpoint into a Hugging Face folder, and checks that it is the model that trained.

    python tools/convert_checkpoint.py --config configs/demo.yaml
    python tools/convert_checkpoint.py --config configs/demo.yaml --format expansion --output exported
    python tools/convert_checkpoint.py --checkpoint runs/demo/checkpoints/step_00000300 --base data/models/stories260K \
        --output exported --format stock --dtype bf16

With --config: the run's newest checkpoint, into <folder>/hf or --output. Formats: `stock` loads anywhere with no code
of ours; `scale` carries one file of code (trust_remote_code=True); `peft` holds LoRA's adapters, for the package of
that name; `expansion` holds what SCALE added alone; `auto` takes stock where it can.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from pipeline import command_line, log
from pipeline.conversion import Format, Precision
from pipeline.run_folder.attempts import stage_of

logger = log.get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="the run's YAML file")
    parser.add_argument("--checkpoint", type=Path, help="a folder such as runs/demo/checkpoints/step_00000300")
    parser.add_argument("--base", type=Path, help="the folder of the model that was trained on")
    parser.add_argument("--output", type=Path, help="the folder to make (default with --config: <folder>/hf)")
    parser.add_argument("--format", choices=get_args(Format), default="auto")
    parser.add_argument("--dtype", choices=get_args(Precision), help="default: the base's")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="documents to verify on (JSONL, .txt, .zst …)")
    arguments = parser.parse_args()

    named = (arguments.checkpoint, arguments.base)
    if any(named) if arguments.config else not all((*named, arguments.output)):
        parser.error("give --config, or --checkpoint with --base and --output")
    with stage_of(arguments.config, "convert", alone=True):
        _convert(arguments)


def _convert(arguments: argparse.Namespace) -> None:
    # The options and the configuration are read before: a mistake in them waits for no torch.
    from pipeline.conversion.convert import DTYPES, Conversion, convert, latest_conversion, run_keys, run_texts
    from pipeline.conversion.verify import probe_maker

    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    if arguments.config:
        asked = latest_conversion(arguments.config, arguments.format, dtype, arguments.output)
        texts, keys = run_texts(arguments.config), run_keys(arguments.config)
    else:
        places = (arguments.checkpoint, arguments.base, arguments.output)
        asked = Conversion(*places, format=arguments.format, dtype=dtype)
        texts, keys = {}, {}
    if arguments.text:
        texts, keys = {path.name: [str(path)] for path in arguments.text}, {}
    if convert(asked, probe_maker(texts, keys)):
        logger.info("wrote %s", asked.output)
    else:
        logger.info("%s is there already", asked.output)


if __name__ == "__main__":
    command_line.run(main)
