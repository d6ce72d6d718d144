"""Perplexity and bits per byte of a Hugging Face folder on given texts, or the final table of a run.

    python tools/evaluate.py --model exported --data data/demo/*.heldout.jsonl.zst
    python tools/evaluate.py --config configs/demo.yaml

With --config: the base before and the exported model after, on the held-out texts of the run's corpora, and
<folder>/summary.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.config import load_config
from pipeline.data.tokenizer_training import texts
from pipeline.evaluation.folder import score_folder
from pipeline.evaluation.summary import summarise
from pipeline.evaluation.table import score_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="the YAML file of a finished run")
    parser.add_argument("--model", type=Path, help="any Hugging Face model folder")
    parser.add_argument("--data", nargs="+", default=[], help="texts: JSONL, .txt, Parquet, also .gz, .zst, .xz")
    parser.add_argument("--text-key", default="text", help="the field of a record that holds its text")
    parser.add_argument("--context", type=int, help="tokens in a window (default: the model's, at most 4096)")
    parser.add_argument("--stride", type=int, help="tokens between two windows (default: half the context)")
    parser.add_argument("--max-documents", type=int, help="score only so many of each file")
    parser.add_argument("--max-tokens", type=int, help="score about so many of each (0: all)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python files in the model's folder")
    arguments = parser.parse_args()

    if arguments.config and not arguments.model and not arguments.data:
        print(summarise(load_config(arguments.config), max_tokens=arguments.max_tokens).as_text())
    elif arguments.model and arguments.data and not arguments.config:
        scores = score_folder(
            arguments.model,
            {name: texts([name], text_key=arguments.text_key) for name in arguments.data},
            context=arguments.context,
            stride=arguments.stride,
            max_documents=arguments.max_documents,
            max_tokens=arguments.max_tokens or None,
            trust_remote_code=arguments.trust_remote_code,
        )
        print(score_table(scores))
    else:
        parser.error("give --config, or --model with --data")


if __name__ == "__main__":
    command_line.run(main)
