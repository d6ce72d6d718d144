"""Turns a training checkpoint into a Hugging Face folder, and checks that it is the model that trained.

    python tools/convert_checkpoint.py --config configs/demo.yaml
    python tools/convert_checkpoint.py --checkpoint runs/demo/checkpoints/step_00000300 --base data/demo/stories260K \
        --output exported --format stock --dtype bf16

With --config: the run's newest checkpoint, into <folder>/hf. Formats: `stock` loads anywhere with no code of ours;
`scale` carries one file of code (trust_remote_code=True); `expansion` holds what was added alone; `auto` takes stock
where it can.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line, log
from pipeline.conversion.convert import DTYPES, Conversion, convert
from pipeline.conversion.probe import probe_maker
from pipeline.conversion.runs import latest_conversion, run_texts

logger = log.get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="the run's YAML file")
    parser.add_argument("--checkpoint", type=Path, help="a folder such as runs/demo/checkpoints/step_00000300")
    parser.add_argument("--base", type=Path, help="the folder of the model that was trained on")
    parser.add_argument("--output", type=Path, help="the folder to make")
    parser.add_argument("--format", choices=("auto", "stock", "scale", "expansion"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: the base's")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="documents to verify on (JSONL, .txt, .zst …)")
    arguments = parser.parse_args()

    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    paths = (arguments.checkpoint, arguments.base, arguments.output)
    if arguments.config is not None and not any(paths):
        asked = latest_conversion(arguments.config, arguments.format, dtype)
        texts = run_texts(arguments.config)
    elif arguments.config is None and all(paths):
        asked = Conversion(*paths, format=arguments.format, dtype=dtype)
        texts = {}
    else:
        parser.error("give --config, or --checkpoint with --base and --output")
    texts = {path.name: [str(path)] for path in arguments.text} or texts
    if convert(asked, probe_maker(texts)):
        logger.info("wrote %s", asked.output)
    else:
        logger.info("%s is there already", asked.output)


if __name__ == "__main__":
    command_line.run(main)
