"""A real model's gated export in the tools that people use: TRL, lm-eval, bitsandbytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from pipeline.extensions.tasks.benchmarks import benchmark_model, load_tasks, task_results
from pipeline.hf.load import load_hf_model
from tests.extensions.tasks.task_files import write_task_files

pytestmark = pytest.mark.full

BITSANDBYTES = "bitsandbytes==0.50.2"
KOREAN = "이 영화 정말 재미있어요."
IN_FOUR_BITS = """
import sys
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

folder = sys.argv[1]
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
options = {"trust_remote_code": True, "quantization_config": four_bits, "device_map": "cpu"}
model = AutoModelForCausalLM.from_pretrained(folder, **options)
maps = sum(isinstance(module, Linear4bit) for module in model.modules())
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("The capital of France is", return_tensors="pt")
written = model.generate(**ids, max_new_tokens=3, do_sample=False)
print(maps, repr(tokenizer.decode(written[0])))
"""


def test_trl_trains_it_for_five_steps(gated_export, tmp_path):
    model = load_hf_model(gated_export)
    gate = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if name.startswith("token_gate.")
    }
    assert gate
    trainer = SFTTrainer(
        model,
        SFTConfig(
            tmp_path,
            max_steps=5,
            learning_rate=1e-4,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"text": KOREAN}] * 2),
        eval_dataset=Dataset.from_list([{"text": KOREAN}]),
        processing_class=AutoTokenizer.from_pretrained(gated_export),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    for name, value in gate.items():
        assert torch.equal(model.state_dict()[name], value)


def test_lm_eval_gives_it_the_bases_scores_in_english(smollm2, gated_export, tmp_path):
    tasks = load_tasks(["arc", "passive"], include=write_task_files(tmp_path))
    of_base = task_results(benchmark_model(smollm2), tasks)
    assert task_results(benchmark_model(gated_export), tasks) == of_base
    assert max(result.value for result in of_base) > 0.5


def test_bitsandbytes_loads_it_in_four_bits(gated_export, tmp_path):
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(packages)]
    subprocess.run([*install, BITSANDBYTES], check=True, capture_output=True)
    (program := tmp_path / "four_bits.py").write_text(IN_FOUR_BITS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), str(gated_export)],
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    maps, written = done.stdout.splitlines()[-1].split(" ", maxsplit=1)
    assert int(maps) >= 7 * 30  # the maps of each of its 30 layers
    assert "Paris" in written
