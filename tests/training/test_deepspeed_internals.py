"""Every attribute of DeepSpeed's insides that `pipeline.training.deepspeed_internals` uses exists."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pipeline.training.deepspeed_internals import TRIED_VERSION
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, prepared, start_deepspeed

PROJECT = Path(__file__).parents[2]

# The use of each attribute, to be compared when another DeepSpeed is installed.
OF_DEEPSPEED = {
    "ops.__compatible_ops__": "init_distributed sets deepspeed_shm_comm to False there: nothing is compiled for gloo",
    "zero.Init._zero_init_param": "_PartitionedUnset overrides it: Init calls it for each parameter that is made",
    "zero.Init._convert_to_deepspeed_param": "_PartitionedUnset calls it: it adds ds_tensor, ds_numel and partition()",
    "DeepSpeedEngine._copy_recovery_script": "save replaces it: it copies zero_to_fp32.py into every checkpoint",
    "runtime.checkpoint_engine.TorchCheckpointEngine.save": "_CheckpointFiles overrides save(state_dict, path)",
}
OF_ENGINE = {
    "checkpoint_engine": "save replaces it: save_checkpoint hands every file to its save",
    "global_steps": "publish sets it: the steps behind the run",
    "optimizer.optimizer.state": "restore and held_optimizer_elements: the torch optimizer's state, by flat tensor",
}
OF_OPTIMIZER = {
    1: {"update_lp_params": "publish: copies the fp32 weights to the model's and gathers them"},
    3: {
        "fp32_partitioned_groups_flat": "_piece_of_zero3: the flat fp32 weights; only ZeRO-3's optimizer has it",
        "grad_position": "_piece_of_zero3: by parameter id (group, start in the flat tensor, length)",
        "get_param_id": "_piece_of_zero3: the key of a parameter in grad_position",
        "checkpoint_event_prologue": "publish: partitions the parameters that are kept whole",
        "checkpoint_event_epilogue": "publish: gathers them again",
    },
}
OF_PARAMETER = {
    1: {
        "_hp_mapping.hp_fragment_address.start": "_piece: where the parameter begins in the flat fp32 weights",
        "_hp_mapping.hp_fragment_address.numel": "_piece: how many of its elements this rank updates",
        "_hp_mapping.lp_fragment_address.start": "_piece: the first of them in the parameter",
        "_hp_mapping.param_group_index": "_piece: whose flat tensor it is",
    },
    3: {
        "ds_tensor.ds_numel": "attach_zero_partitions: how long each rank's partition is, with padding",
        "ds_numel": "attach_zero_partitions: how many elements the parameter has",
        "ds_process_group": "attach_zero_partitions: the ranks that share it",
    },
}


def test_the_tested_version_is_installed():
    requirements = (PROJECT / "setup.py").read_text(encoding="utf-8")
    (line,) = (line for line in requirements.splitlines() if '"deepspeed' in line)
    assert Requirement(line.strip().strip('",')).specifier.contains(TRIED_VERSION)
    assert version("deepspeed") == TRIED_VERSION, (
        f"DeepSpeed {version('deepspeed')} is installed, and {TRIED_VERSION} was tried: if tests/training and "
        "tests/conversion pass, set TRIED_VERSION in pipeline/training/deepspeed_internals.py to it"
    )


@pytest.fixture(scope="module")
def missing(tokens, tmp_path_factory) -> list[str]:
    """The attributes that a real engine of ZeRO-1 and one of ZeRO-3 lack."""
    folder = tmp_path_factory.mktemp("internals")
    jobs = [partial(_missing, make_run(folder / str(zero), tokens, zero=zero), zero) for zero in (1, 3)]
    [found] = run_ranks(in_turn, 1, jobs)
    return [fault for faults in found for fault in faults]


def test_every_attribute_exists(missing):
    assert not missing, (
        f"DeepSpeed {version('deepspeed')} lacks what pipeline/training/deepspeed_internals.py uses, which was tried "
        f"with {TRIED_VERSION}. Find in DeepSpeed's source what took its place:\n" + "\n".join(missing)
    )


def _missing(config: Path, zero: int) -> list[str]:
    start_deepspeed()
    import deepspeed

    from pipeline.parallel.sharding import named_trained_parameters, zero_partition_of

    trainer, _, _ = prepared(config)
    trainer.observers.on_end(finished=True)
    engine = trainer.engine._engine
    (_, parameter), *_ = named_trained_parameters(trainer.engine.model)
    faults = [
        f"{name}.{attribute} ({use})"
        for name, owner, attributes in [
            ("deepspeed", deepspeed, OF_DEEPSPEED),
            ("engine", engine, OF_ENGINE),
            (f"ZeRO-{zero}'s optimizer", engine.optimizer, OF_OPTIMIZER[zero]),
            (f"a trained parameter of ZeRO-{zero}", parameter, OF_PARAMETER[zero]),
        ]
        for attribute, use in attributes.items()
        if not _has(owner, attribute)
    ]
    if "deepspeed_shm_comm" not in deepspeed.ops.__compatible_ops__:
        faults.append(
            f"deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] ({OF_DEEPSPEED['ops.__compatible_ops__']})"
        )
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat") != (zero == 3):
        faults.append(
            f"ZeRO-{zero}'s optimizer.fp32_partitioned_groups_flat (restore distinguishes ZeRO-3 from 1 and 2 by it)"
        )
    held = zero_partition_of(parameter)
    if zero == 3 and (held is None or held.values is not parameter.ds_tensor):
        faults.append("parameter.ds_tensor (attach_zero_partitions keeps it: it must stay the same tensor for good)")
    return faults


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
