"""What a rank asks of its device and memory: it reads only what it will hold, and holds no more
while it reads.
"""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.run import load_config
from pipeline.files.hashes import file_hash
from pipeline.model.base_folder import INDEX_FILE, BaseFolder
from pipeline.parallel.parameters import full_shape_of, held_values
from pipeline.parallel.topology import ProcessGroups
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, metrics, start_deepspeed, train, write_config

MIB = 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A base of some 230 MiB in two files."""
    folder = tmp_path_factory.mktemp("large")
    widths = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    config = LlamaConfig(vocab_size=6001, num_hidden_layers=4, tie_word_embeddings=True, **widths)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()
        }
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(shapes))}
    for file in set(files.values()):
        save_file(
            {name: torch.ones(shapes[name]) for name in files if files[name] == file}, folder / file
        )
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize(("zero", "tp_size"), [(3, 1), (1, 2)])
def test_no_rank_holds_much_more_than_its_shard_while_it_loads(large, tmp_path, zero, tp_size):
    config = write_config(
        tmp_path,
        tmp_path,
        zero=zero,
        base=str(large),
        method={"name": "fft"},
        parallel__tp_size=tp_size,
    )
    for peak, held, whole, largest in run_ranks(_load, 2, config):
        assert whole > 200 * MIB and held < 0.51 * whole
        assert held * 0.9 < peak < 1.5 * held + largest, (
            f"held {held / MIB:.0f} MiB, at its peak {peak / MIB:.0f} MiB"
        )


def _load(path: Path) -> tuple[int, int, int, int]:
    """The most that was resident while loading, what is held after it, the whole model, and the
    largest shard of a tensor; all in bytes."""
    start_deepspeed()
    from pipeline.checks.inputs import RunInputs
    from pipeline.training import base_copies, trainer

    config = load_config(path)
    inputs = RunInputs(config, dist.get_world_size())
    layout = inputs.layout
    groups = ProcessGroups(layout)
    hashed: list[str] = []
    base_copies.file_hash = lambda path: hashed.append(path.name) or file_hash(path)
    base = inputs.base
    base_copies.hash_base(inputs)
    assert len(hashed) == 1, "each of the two ranks reads one of the two files"
    assert base.hashes == {file.name: file_hash(file) for file in base.files}
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    model = trainer.load_model(inputs, inputs.config, groups, torch.device("cpu"))
    peak = _status("VmHWM") - before
    parameters = list(model.parameters())
    held = sum(held_values(parameter).nbytes for parameter in parameters)
    whole = sum(prod(full_shape_of(parameter)) for parameter in parameters) * 4
    largest = max(prod(full_shape_of(parameter)) for parameter in parameters) * 4 // layout.tp_size
    return peak, held, whole, largest


def _status(entry: str) -> int:
    """A value of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")) * 1024


def devices(config):
    """The devices of a model that was made, and loaded, for a device whose memory is not the
    host's.
    """
    start_deepspeed()
    from pipeline.checks.checklist import check_stage
    from pipeline.methods.registry import training_method
    from pipeline.parallel.topology import ProcessGroups
    from pipeline.training.load_model import build_on_device

    inputs = check_stage(load_config(config), 1, "train")
    groups = ProcessGroups(inputs.layout)
    model = build_on_device(
        inputs.config, inputs.base, inputs.deepspeed_config, groups, torch.device("meta")
    )
    training_method(inputs.config).load(model, inputs.base, groups.tensor_parallel)
    return {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}


def test_under_zero_1_and_2_no_weight_is_made_in_host_memory(tokens, tmp_path):
    lora = {"method": {"name": "lora", "rank": 2}, "base_precision": "nf4"}
    configs = [make_run(tmp_path / str(len(own)), tokens, zero=2, **own) for own in ({}, lora)]
    assert run_ranks(in_turn, 1, [partial(devices, config) for config in configs]) == [
        [{"meta"}] * 2
    ]


def test_what_is_replaced_exists():
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert "self._zero_init_param(param)" in inspect.getsource(deepspeed.zero.Init)


def broadcast_elements(config: Path, *, all_parameters: bool) -> tuple[int, int, int]:
    """Trains; the exit code, how many elements DeepSpeed broadcast, and how many train."""
    start_deepspeed()
    from pipeline.training import trainer
    from pipeline.training.deepspeed_internals import zero_parameters

    sent: list[int] = []
    engines: list[trainer.Engine] = []
    broadcast = deepspeed.comm.broadcast

    def counted(tensor: torch.Tensor, *arguments: object, **named: object) -> None:
        sent.append(tensor.numel() * tensor.element_size() // 4)  # they are sent as bytes of fp32
        broadcast(tensor, *arguments, **named)

    def remembered(*arguments: Any, **named: Any) -> trainer.Engine:
        engines.append(Engine(*arguments, **named))
        return engines[-1]

    Engine = trainer.Engine  # noqa: N806
    kept = nullcontext if all_parameters else zero_parameters.frozen_kept_as_read
    with (
        patch.object(deepspeed.comm, "broadcast", counted),
        patch.object(trainer, "Engine", remembered),
        patch.object(zero_parameters, "frozen_kept_as_read", kept),
    ):
        code = train(config)
    marked = [one for one in engines[0].model.parameters() if hasattr(one, "ds_optim_param")]
    assert not marked
    trained = [one.numel() for one in engines[0].model.parameters() if one.requires_grad]
    return code, sum(sent), sum(trained)


def train_on_a_damaged_copy(config: Path) -> int:
    """Trains where rank 1 reads another base than rank 0, by the last bit of one weight."""
    read = BaseFolder.read

    def damaged(base: BaseFolder, name: str, *arguments: Any, **named: Any) -> torch.Tensor:
        values = read(base, name, *arguments, **named)
        if dist.get_rank() == 1 and name == "layers.2.ffn.up.base.weight":
            values[3, 4] = torch.nextafter(values[3, 4], torch.tensor(9.0))
        return values

    with patch.object(BaseFolder, "read", damaged):
        return train(config)


@pytest.mark.parametrize("zero", [1, 2])
def test_only_what_trains_is_broadcast_and_a_base_that_differs_is_refused(tokens, tmp_path, zero):
    configs = [make_run(tmp_path / name, tokens, zero=zero) for name in ("kept", "sent", "other")]
    jobs = [
        partial(broadcast_elements, configs[0], all_parameters=False),
        partial(broadcast_elements, configs[1], all_parameters=True),
        partial(train_on_a_damaged_copy, configs[2]),
    ]
    first, second = run_ranks(in_turn, 2, jobs)
    for ours, as_deepspeed, _ in (first, second):
        code, sent, trained = ours
        assert code == 0 and sent == trained > 0
        assert as_deepspeed[0] == 0 and as_deepspeed[1] > 2 * trained
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "sent")
    assert first[2] == "exit 1"
    assert second[2].startswith("BaseModelError: rank 1 on ")
