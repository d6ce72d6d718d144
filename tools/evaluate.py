"""What a Hugging Face folder knows: perplexity on given texts, benchmarks, or the final table of a run.

    python tools/evaluate.py --model exported --data data/*/*.heldout.jsonl.zst
    python tools/evaluate.py --model base exported --tasks kobest_copa arc_easy --data folder/of/task/files
    python tools/evaluate.py --config configs/demo.yaml

Several models stand side by side. --tasks takes lm-eval's names; with --data their documents come from local files, and
no network is asked for anything. With --config: the base before and the exported model after, on the held-out texts of
the run's corpora, and <folder>/summary.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.config.run import load_config
from pipeline.data.records import Keys
from pipeline.data.tokenizer_training import good_documents
from pipeline.evaluation import options
from pipeline.run_folder.attempts import stage_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_options(parser)
    arguments = parser.parse_args()
    asked = {name for name in ("config", "model", "tasks", "data") if getattr(arguments, name)}
    # Each loads what it needs, and --help no torch.
    if asked == {"config"}:
        with stage_of(arguments.config, "evaluate"):
            from pipeline.evaluation.summary import summarise

            print(summarise(load_config(arguments.config), max_tokens=arguments.max_tokens).as_text())
    elif {"model", "tasks"} <= asked and "config" not in asked and len(arguments.data) <= 1:
        _check_folders(arguments)
        from pipeline.evaluation.benchmarks import comparison, run_benchmarks
        from pipeline.evaluation.table import as_json

        data = Path(arguments.data[0]) if arguments.data else None
        given = options.of_benchmarks(arguments)
        results = {str(one): run_benchmarks(one, arguments.tasks, data=data, **given) for one in arguments.model}
        print(as_json(results) if arguments.json else comparison(results))
    elif asked == {"model", "data"}:
        _check_folders(arguments)
        from pipeline.evaluation.perplexity import score_folder
        from pipeline.evaluation.table import as_json, score_table

        given, keys = options.of_perplexity(arguments), Keys(arguments.text_key, arguments.prompt_key)
        scores = {}
        for model in arguments.model:
            corpora = {name: good_documents([name], keys) for name in arguments.data}
            scores[str(model)] = score_folder(model, corpora, **given)
        print(as_json(scores) if arguments.json else score_table(scores))
    else:
        parser.error("give --config, or --model with --data, or --model and --tasks with or without a folder as --data")


def _check_folders(arguments: argparse.Namespace) -> None:
    """The last model is not to be found missing when the others have been scored for hours."""
    from pipeline.conversion.hf_folder import check_hf_config

    for model in arguments.model:
        check_hf_config(model, trust_remote_code=arguments.trust_remote_code)


if __name__ == "__main__":
    command_line.run(main)
