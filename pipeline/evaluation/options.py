"""The command-line options of perplexity and benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is evaluated, on what, and how; `of_perplexity` and `of_benchmarks` read the how."""
    parser.add_argument("--config", type=Path, help="the YAML file of a finished run")
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="any Hugging Face model folders")
    parser.add_argument("--tasks", nargs="+", default=[], help="e.g. kobest_boolq kobest_copa arc_easy blimp")
    parser.add_argument("--data", nargs="+", default=[], help="texts: JSONL, .txt, Parquet; or a folder of task files")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python files in a model's folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    perplexity = parser.add_argument_group("perplexity")
    perplexity.add_argument("--text-key", default="text", help="the field of a record that holds its text")
    perplexity.add_argument("--prompt-key", help="that of a prompt before it, which is read but not scored")
    perplexity.add_argument("--context", type=int, help="tokens in a window (default: the model's, at most 4096)")
    perplexity.add_argument("--stride", type=int, help="tokens between two windows (default: half the context)")
    perplexity.add_argument("--max-documents", type=int, help="score only so many of each file")
    perplexity.add_argument("--max-tokens", type=int, help="score about so many of each (0: all)")
    benchmarks = parser.add_argument_group("benchmarks")
    benchmarks.add_argument("--few-shot", type=int, help="solved examples before each question (default: none)")
    benchmarks.add_argument("--limit", type=int, help="ask only the first so many of each task")
    benchmarks.add_argument("--batch-size", type=int, default=16, help="answers weighed at a time (default 16)")


def of_perplexity(arguments: argparse.Namespace) -> dict[str, Any]:
    """How `score_folder` is to work."""
    values = _values(arguments, "context", "stride", "max_documents", "trust_remote_code")
    return {**values, "max_tokens": arguments.max_tokens or None}


def of_benchmarks(arguments: argparse.Namespace) -> dict[str, Any]:
    """How `run_benchmarks` is to work."""
    return _values(arguments, "few_shot", "limit", "batch_size", "trust_remote_code")


def _values(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names}
