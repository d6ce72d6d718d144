"""lm-eval's own tasks on documents that lie here, for a machine without the hub.

    python -m studies.smollm2.local_tasks --data path/to/eval --output runs/smollm2/tasks
    scale-cpt evaluate --model BASE EXPORT --include-path runs/smollm2/tasks --tasks local_kobest_copa

Prompts and choices are those of lm-eval's files, which these include; of the metrics accuracy alone,
since lm-eval loads F1 from the hub. `--data` holds kobest/<name>/test.jsonl, arc_easy/test.jsonl
and blimp/<name>.jsonl, in the fields of lm-eval's tasks of these names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import lm_eval.tasks
import yaml

from pipeline import command_line
from pipeline.errors import DataError

TASKS = Path(lm_eval.tasks.__file__).parent
PREFIX = "local_"
ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]


def documents_of_tasks(data: Path) -> Iterator[tuple[Path, str, Path]]:
    """lm-eval's file of each task, the split that it scores, and the file of that split."""
    for file in sorted(data.glob("kobest/*/test.jsonl")):
        yield TASKS / "kobest" / f"kobest_{file.parent.name}.yaml", "test", file
    for file in sorted(data.glob("arc_easy/test.jsonl")):
        yield TASKS / "arc" / "arc_easy.yaml", "test", file
    for file in sorted(data.glob("blimp/*.jsonl")):
        # BLiMP has one split, which lm-eval takes for its validation.
        yield TASKS / "blimp" / f"{file.stem}.yaml", "validation", file


def write_tasks(data: Path, output: Path) -> list[str]:
    """Writes a file for each task; returns the tasks' names.

    Raises:
        DataError: `data` holds none of these data sets, or one that lm-eval does not have.
    """
    names: list[str] = []
    for task, split, documents in documents_of_tasks(data):
        if not task.exists():
            raise DataError(
                f"{documents}: lm-eval has no task {task.stem}; rename it, or remove it"
            )
        name = PREFIX + (f"blimp_{task.stem}" if task.parent.name == "blimp" else task.stem)
        settings = {
            "include": str(task),
            "task": name,
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(documents.resolve())}},
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{split}_split": split,
            "metric_list": ACCURACY,
        }
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        names.append(name)
    if not names:
        raise DataError(
            f"{data}: expected kobest/<name>/test.jsonl, arc_easy/test.jsonl or blimp/<name>.jsonl, "
            "found none of them; give the folder that holds the data sets"
        )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    options = parser.parse_args()
    for name in write_tasks(options.data, options.output):
        print(name)


if __name__ == "__main__":
    command_line.run(main)
