"""What a validation measures besides scoring: tasks, prompts and the probe leave training as it is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.run import RunConfig, load_config
from pipeline.errors import ConfigError, DataError
from pipeline.extensions.tasks.benchmarks import benchmark_model, load_tasks, task_results
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.extensions.tasks.task_files import write_task_files, write_written_task
from tests.training.runs import (
    in_turn,
    make_run,
    metrics,
    prepared,
    train_and_look,
    write_config,
)

EACH = {"validation__every_steps": 1, "schedule__steps": 3}
PROMPTS = ["Once upon a time", "옛날에"]


def texts_in(folder: Path) -> dict[str, list[str]]:
    """The texts that TensorBoard has, by name, in the order of steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("events.*")):
        events = EventAccumulator(str(file), size_guidance={"tensors": 0})
        events.Reload()
        for tag in events.Tags()["tensors"]:
            for event in events.Tensors(tag):
                text = event.tensor_proto.string_val[0].decode()
                found.setdefault(tag.removesuffix("/text_summary"), []).append(text)
    return found


def generated(config: Path) -> list[list[int]]:
    """What the model of a run about to start continues its prompts with."""
    from pipeline.observers.prompts import PromptTexts

    texts = PromptTexts(prepared(config))
    return texts._continue(texts.prompts)


@pytest.mark.parametrize(("zero", "tp_size"), [(3, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_tasks_prompts_and_probe_change_no_weight(zero, tp_size, tokens, tmp_path):
    files = write_task_files(tmp_path / "tasks")
    model = benchmark_model(STORIES)
    write_written_task(files, half_of_the_answers(model))
    layout = {"zero": zero, "parallel__tp_size": tp_size, "data__sequence_length": 96}
    asks = {
        "validation__tasks": ["copa", "arc", "written"],
        "validation__tasks_folder": str(files),
        "validation__tasks_every": 2,
        "validation__prompts": PROMPTS,
        "validation__prompt_tokens": 8,
        "validation__probe": "korean",
    }
    plain = make_run(tmp_path / "plain", tokens, **EACH, **layout)
    asked = make_run(tmp_path / "asked", tokens, **EACH, **layout, **asks)
    fresh = make_run(tmp_path / "fresh", tokens, **EACH, **layout, **asks)
    runs = run_ranks(
        in_turn,
        2,
        [partial(train_and_look, plain), partial(train_and_look, asked), partial(generated, fresh)],
    )
    for of_plain, of_asked, _ in runs:
        for name, values in of_plain["parameters"].items():
            assert torch.equal(values, of_asked["parameters"][name]), name

    # The same loss, and the same figures of held-out text.
    lines = metrics(tmp_path / "asked")
    for line, expected in zip(lines, metrics(tmp_path / "plain"), strict=True):
        for name in ("loss", "perplexity/korean"):
            assert line.get(name) == expected.get(name)
    # Before the first step, at every second validation, and at the end.
    asked_at = [line["step"] for line in lines if "acc/copa" in line]
    assert asked_at == [0, 2, 3]
    # As lm-eval's own model of the base answers.
    loaded = load_tasks(["copa", "arc", "written"], include=files)
    for result in task_results(model, loaded):
        assert lines[0][f"{result.metric}/{result.task}"] == result.value
    assert lines[0]["exact_match.strict/written"] == lines[0]["exact_match.again/written"] == 0.6

    last = lines[-1]
    assert last["kl_from_base/korean"] > 0 and 0 < last["changed_top_tokens/korean"] < 1
    assert "kl_from_base/english" not in last
    found = texts_in(tmp_path / "asked")
    assert len(found["prompt/1"]) == len(found["prompt/2"]) == 4
    assert found["prompt/1"][0].startswith("**Once upon a time** ")
    # What transformers writes, each token the likeliest.
    assert runs[0][2] == runs[1][2] == likeliest(asked)


def half_of_the_answers(model: Any) -> dict[str, str]:
    """Answers to questions that take a text: of three what `model` writes, of two nothing like it."""
    from lm_eval.api.instance import Instance

    questions = ["Once upon a time", "Lily and Tom", "One day, a big dog", "The", "She said"]
    options = {"until": ["."], "do_sample": False, "max_gen_toks": 12}
    requests = [
        Instance("generate_until", {}, (question, dict(options)), 0) for question in questions
    ]
    answers = dict(zip(questions, model.generate_until(requests), strict=True))
    return {**answers, "The": "?", "Lily and Tom": "?"}


@torch.no_grad()
def likeliest(config: Path) -> list[list[int]]:
    """How transformers continues the prompts of a run with its base."""
    from pipeline.data.tokenizer.load import load_tokenizer
    from pipeline.data.tokenizer.spelling import ids_of
    from pipeline.hf.load import load_hf_model

    model, tokenizer = load_hf_model(STORIES, torch.float32), load_tokenizer(STORIES)
    continued = []
    for prompt in load_config(config).validation.prompts:
        ids = [*tokenizer.before_document, *ids_of(tokenizer, prompt)]
        start = len(ids)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        continued.append(ids[start:])
    return continued


def test_tasks_that_are_not_there_are_refused_before_training(tokens, tmp_path):
    from pipeline.checks.checklist import check_stage

    files = write_task_files(tmp_path / "tasks")
    ours = {"validation__tasks_folder": str(files)}
    config = _config_with(tmp_path / "run", **ours, validation__tasks=["copas"])
    with pytest.raises(ConfigError, match=r"validation\.tasks copas: .* no such task"):
        check_stage(config, 2, "train")
    write_written_task(files, {"a": "b"}, max_gen_toks=32)
    config = _config_with(tmp_path / "run", **ours, validation__tasks=["written"])
    with pytest.raises(ConfigError, match="do not fit data\\.sequence_length 32; ask the export"):
        check_stage(config, 2, "train")
    write_written_task(files, {"a": "b"}, do_sample=True)
    with pytest.raises(ConfigError, match=r"drawn at random \(do_sample\)"):
        check_stage(config, 2, "train")
    Path(files / "copa.jsonl").unlink()
    config = _config_with(tmp_path / "run", **ours, validation__tasks=["copa"])
    with pytest.raises(DataError, match=r"validation\.tasks copa: documents cannot be read"):
        check_stage(config, 2, "train")


def _config_with(folder: Path, **changes: Any) -> RunConfig:
    return load_config(write_config(folder, folder, **changes))
