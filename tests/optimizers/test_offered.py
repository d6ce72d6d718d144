"""An optimizer that an extension offers: the Lion of examples/extension trains, resumes and is
estimated, and what a checkpoint could not hold is refused before the first save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pipeline.config import schedule
from pipeline.config.run import load_config
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.errors import RESUME_LATER, ExtensionError
from pipeline.model.decoder import is_layer_matrix
from pipeline.model.from_hf import open_base
from pipeline.optimizers.optimizer import moments_of, optimizer_named
from pipeline.parallel.topology import Layout
from pipeline.sizing.checkpoints import checkpoint_bytes
from pipeline.sizing.memory import optimizer_bytes
from pipeline.sizing.micro_batch import measure_micro_batch
from pipeline.sizing.parameters import parameters_of
from pipeline.sizing.training_state import training_state_bytes
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, prepared, train, trained, write_config

PROJECT = Path(__file__).parents[2]
MATRICES = "return is_layer_matrix(name, parameter)"
ONE_MOMENT = 'moments: tuple[Moment, ...] = ("exp_avg",)'


def example_lion() -> str:
    """The module of the example that docs/extensions.md names."""
    example = PROJECT / "examples" / "extension" / "scale_cpt_attention" / "lion.py"
    return example.read_text(encoding="utf-8")


def changed_lion(old: str, new: str) -> str:
    source = example_lion()
    assert old in source
    return source.replace(old, new)


def write_lion(folder: Path, source: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "lion.py").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Offers the object of a module's source as the optimizer `lion`."""

    def offer(source: str, value: str = "LION") -> None:
        monkeypatch.syspath_prepend(write_lion(tmp_path / "packages", source))
        monkeypatch.delitem(sys.modules, "lion", raising=False)
        monkeypatch.setitem(schedule.CORE_OPTIMIZERS, "lion", f"lion:{value}")
        forget()

    def forget() -> None:
        schedule.offered_optimizers.cache_clear()
        optimizer_named.cache_clear()

    yield offer
    monkeypatch.undo()
    forget()


def on_rank(packages: Path, *jobs):
    """The results of jobs on a rank where the optimizer `lion` of the folder is offered."""
    sys.path.insert(0, str(packages))
    schedule.CORE_OPTIMIZERS["lion"] = "lion:LION"
    schedule.offered_optimizers.cache_clear()
    return in_turn(jobs)


class Training:
    """Trains a run; a job that other processes can be given."""

    def __init__(self, config: Path, *, stop: bool = False) -> None:
        self.config = config
        self.stop = stop

    def __call__(self) -> int:
        return train(self.config, stop=self.stop)


class FirstSteps:
    """Trains a run whose errors are not turned into exit codes."""

    def __init__(self, config: Path) -> None:
        self.config = config

    def __call__(self) -> None:
        trained(prepared(self.config))


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        (
            changed_lion(ONE_MOMENT, 'moments = ("exp_avg_sq", "exp_avg")'),
            "LION",
            "moments: expected (), ('exp_avg',) or ('exp_avg', 'exp_avg_sq'), in this order, found "
            "('exp_avg_sq', 'exp_avg'); call the first that it stores exp_avg",
        ),
        (
            changed_lion(ONE_MOMENT, 'moments = ("exp_avg_sq",)'),
            "LION",
            "moments: expected (), ('exp_avg',) or ('exp_avg', 'exp_avg_sq'), in this order, found "
            "('exp_avg_sq',); call the first that it stores exp_avg",
        ),
        (
            changed_lion(ONE_MOMENT, ""),
            "LION",
            "moments: expected (), ('exp_avg',) or ('exp_avg', 'exp_avg_sq'), in this order, found "
            "None; call the first that it stores exp_avg",
        ),
        (
            changed_lion('name = "lion"', 'name = "Lion"'),
            "LION",
            "name: expected lion, as its extension offers it, found 'Lion'; correct that extension",
        ),
        (
            example_lion(),
            "Lion",
            "an extension offers it, expected an instance of pipeline.optimizers.optimizer."
            "Optimizer, found the class lion.Lion; correct that extension",
        ),
        (
            example_lion(),
            "BETA",
            "an extension offers it, expected an instance of pipeline.optimizers.optimizer."
            "Optimizer, found an object of type builtins.float; correct that extension",
        ),
        (
            changed_lion("def make(", "def made("),
            "LION",
            "an extension offers it, and it cannot be loaded (TypeError: Can't instantiate "
            "abstract class Lion ",
        ),
    ],
    ids=["swapped", "second alone", "forgotten", "name", "class", "value", "abstract"],
)
def test_what_cannot_be_an_optimizer_ends_in_one_line(offered, source, value, message):
    offered(source, value)
    with pytest.raises(ExtensionError) as fault:
        optimizer_named("lion")
    assert str(fault.value).startswith(f"lion:{value}: {message}")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("updates", ["matrices", "all"])
def test_estimates_count_the_moments_that_it_stores(offered, tmp_path, updates):
    offered(example_lion() if updates == "matrices" else changed_lion(MATRICES, "return True"))
    base = open_base(STORIES)
    found = {}
    for name in ("adamw", "muon", "lion"):
        path = write_config(tmp_path, tmp_path, zero=1, name=name, schedule__optimizer=name)
        config = load_config(path)
        parameters = parameters_of(config, base.spec)
        costs = measure_micro_batch(config, base.spec, 1, "none", torch.float32)
        zero = load_deepspeed_config(config.deepspeed, Layout(1))
        held = optimizer_bytes(costs, zero, 1)
        assert held == checkpoint_bytes(parameters)
        found[name] = (parameters, held, training_state_bytes(parameters, torch.bfloat16))
    (adamw, most, state), (muon, less, _), (lion, held, state_of_lion) = found.values()
    matrices = muon.in_matrices if updates == "matrices" else lion.trained
    assert 0 < muon.in_matrices < muon.trained
    assert (adamw.moments, muon.moments) == (2 * adamw.trained, 2 * muon.trained - muon.in_matrices)
    assert lion.moments == 2 * lion.trained - matrices
    assert most - held == state - state_of_lion == 4 * matrices
    assert (held == less) == (updates == "matrices")
    assert lion.values["by_muon"] == 0, "it puts no matrices together"


@pytest.mark.parametrize(("zero", "updates"), [(3, "matrices"), (1, "all")])
def test_the_example_lion_trains_and_resumes_with_the_same_bits(
    offered, tokens, tmp_path, zero, updates
):
    source = example_lion() if updates == "matrices" else changed_lion(MATRICES, "return True")
    offered(source)
    packages = tmp_path / "packages"
    configs = []
    for name in ("whole", "stopped"):
        changes = {"zero": zero, "schedule__optimizer": "lion", "schedule__learning_rate": 1e-4}
        configs.append(make_run(tmp_path / name, tokens, **changes))
    whole, stopped = configs
    jobs = [Training(whole), Training(stopped, stop=True), Training(stopped)]
    for codes in run_ranks(on_rank, 2, packages, *jobs):
        assert codes == [0, RESUME_LATER, 0]
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    # Both moments of what AdamW updates, one of what Lion does, and what was estimated.
    parameters = parameters_of(load_config(whole), open_base(STORIES).spec)
    kinds: dict[str, set[str]] = {}
    elements = 0
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("step_*")
    for path in checkpoint.glob("rank_*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # safe_open gives no mapping
                name, _, kind = key.rpartition("/")
                if kind.startswith(("fp32", "exp_avg")):
                    kinds.setdefault(name, set()).add(kind)
                    elements += file.get_tensor(key).numel()
                    assert file.get_tensor(key).any(), key
    assert 4 * elements == checkpoint_bytes(parameters)
    both = [name for name, found in kinds.items() if "exp_avg_sq" in found]
    assert all({"fp32", "exp_avg"} <= found for found in kinds.values())
    assert bool(both) == (updates == "matrices") and len(both) < len(kinds)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            changed_lion(ONE_MOMENT, 'moments: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")'),
            "its step stores exp_avg, step of .*, expected step, exp_avg, exp_avg_sq, which",
        ),
        (
            changed_lion('"exp_avg"]', '"momentum"]'),
            "its step stores momentum, step of .*, expected step, exp_avg, which",
        ),
    ],
    ids=["missing", "another name"],
)
def test_a_step_that_stores_something_else_is_refused_at_once(
    offered, tokens, tmp_path, source, message
):
    offered(source)
    config = make_run(tmp_path / "run", tokens, zero=1, schedule__optimizer="lion")
    ((found,),) = run_ranks(on_rank, 1, tmp_path / "packages", FirstSteps(config))
    assert found.startswith("ExtensionError: schedule.optimizer lion: "), found
    with pytest.raises(ExtensionError, match=message):
        raise ExtensionError(found)
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_what_it_leaves_is_adamws(offered):
    offered(example_lion())
    weights = {
        "layers.0.ffn.up.base.weight": torch.nn.Parameter(torch.ones(4, 4)),
        "norm.base.weight": torch.nn.Parameter(torch.ones(4)),
    }
    lion = optimizer_named("lion")
    groups = []
    for name, weight in weights.items():
        weight.grad = torch.full_like(weight, 0.5)
        kind = "lion" if lion.updates(name, weight) else "adamw"
        assert (kind == "lion") == is_layer_matrix(name, weight)
        groups.append({"params": [weight], "optimizer": kind, "weight_decay": 0.1})
    settings = schedule.Schedule(
        steps=1, global_batch_size=1, micro_batch_size=1, learning_rate=1e-2
    )
    made = lion.make(groups, settings)
    made.step()
    alone = torch.nn.Parameter(torch.ones(4))
    alone.grad = torch.full_like(alone, 0.5)
    torch.optim.AdamW([alone], lr=1e-2, betas=settings.betas, weight_decay=0.1, fused=True).step()
    matrix, gain = weights.values()
    assert torch.equal(gain, alone)
    # The first step of Lion: the sign of the gradient times the rate, beside the decay.
    assert torch.equal(matrix, torch.full((4, 4), 1.0).mul_(1 - 1e-2 * 0.1).sub_(1e-2))
    for name, weight in weights.items():
        assert set(made.state[weight]) == {"step", *moments_of(lion, name, weight)}


@pytest.mark.full
def test_the_example_lion_has_the_types_of_the_project(tmp_path):
    module = write_lion(tmp_path / "packages", example_lion()) / "lion.py"
    options = ["--config-file", "pyproject.toml", "--follow-imports", "silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(module)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
