"""Models and datasets named on the hub, from a cache folder on this machine; no test needs a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
import zstandard
from huggingface_hub.utils import filter_repo_objects

from pipeline.checks.door import begin, faults_of
from pipeline.checks.inputs import Inputs
from pipeline.config.run import load_config
from pipeline.data import hub_datasets
from pipeline.data.hub_datasets import streamed_files
from pipeline.data.records import Keys
from pipeline.data.units import good_documents
from pipeline.errors import BaseModelError, DataError
from pipeline.hub import model_folder, source_of
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.first_config import propose
from tests.bases import STORIES
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import make_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A hub cache that holds a model as org/stories at COMMIT, its branch `main`; the hub itself is out of reach."""
    folder = tmp_path / "hub"
    model = folder / "models--org--stories"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    for file in STORIES.iterdir():  # the cache holds links into its folder of blobs
        (model / "snapshots" / COMMIT / file.name).symlink_to(file)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return model / "snapshots" / COMMIT


@pytest.mark.parametrize("name", ["org/stories", "org/stories@main", f"org/stories@{COMMIT}"])
def test_a_model_is_found_in_the_cache_by_branch_and_by_commit(name, cache):
    assert model_folder(Path(name)) == cache
    assert source_of(cache) == f"org/stories@{COMMIT}"


def test_folders_and_other_paths_are_left_alone(cache, tmp_path, monkeypatch):
    (tmp_path / "org" / "stories").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder(Path("org/stories")) == Path("org/stories")
    assert source_of(Path("org/stories")) is None
    # A missing folder beside it is nobody's model.
    for path in map(Path, ("org/other", "stories", "/org/stories", "a/b/c", "../stories", "~/stories")):
        assert model_folder(path) == path


@pytest.mark.parametrize("weights", [True, False])
def test_what_an_export_keeps_of_a_base_is_fetched(weights, cache, monkeypatch):
    asked: dict[str, list[str]] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **options: asked.update(options) or str(cache))
    model_folder(Path("org/stories"), weights=weights)
    described = ["config.json", "README.md", "tokenizer.model", "tokenizer.model.v3", "merges.txt", "qwen.tiktoken"]
    terms = ["LICENSE", "LICENSE.txt", "Licence.md", "NOTICE", "USE_POLICY.md", "ACCEPTABLE_USE_POLICY.md"]
    others = ["modeling_x.py", "pytorch_model.bin", "original/consolidated.safetensors", "consolidated.safetensors"]
    wanted = [*described, *terms, *(["model-00001-of-00002.safetensors"] if weights else [])]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert [*filter_repo_objects([*wanted, *others], **patterns)] == wanted


@pytest.mark.parametrize("name", ["org/other", "org/stories@v9", "org/stories@" + "f" * 40])
def test_what_the_cache_lacks_is_refused_in_one_line(name, cache):
    with pytest.raises(BaseModelError, match=f"{name}: no such folder here.*HF_HUB_OFFLINE") as fault:
        model_folder(Path(name))
    assert "\n" not in str(fault.value)


def test_a_run_and_a_first_configuration_name_their_base_on_the_hub(cache, tokens, tmp_path):
    path = make_run(tmp_path / "run", tokens)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "base": "org/stories"}))
    assert load_config(path, base="named").base == Path("org/stories")
    config = load_config(path)
    assert config.base == config.tokenizer == cache
    inputs = begin(config, 1, "train")
    assert inputs.base.path == cache
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "base": "org/other"}))
    with pytest.raises(BaseModelError, match="org/other: no such folder here"):
        begin(load_config(path), 1, "train")
    texts = [str(REVIEWS_HELDOUT)], [str(STORIES_HELDOUT)]
    config, text = propose("first", Path("org/stories@main"), *texts, Cluster(1, gpu_memory_gib=4.0, on_cpu=True))
    assert config.base == cache
    assert yaml.safe_load(text)["base"] == "org/stories@main"


# --- Datasets --------------------------------------------------------------------------------------------------------

DATASET = "hf://org/reviews/default/train"


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> Path:
    """A dataset that lies as the folder org/reviews below the working directory, and an empty HF_HOME."""
    folder = tmp_path / "org" / "reviews"
    folder.mkdir(parents=True)
    rows = [
        {
            "text": f"문서 {number} " + "x" * (number % 7),
            "stars": number,
            "messages": [{"role": "user", "content": "?"}],
        }
        for number in range(1000)
    ]
    for split, own in (("train", rows), ("test", rows[:10])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


def _texts(files: list[Path]) -> list[str]:
    return [document.text for document in good_documents(list(map(str, files)), Keys())]


def test_a_dataset_is_streamed_once_in_order_and_its_text_only(dataset):
    files = streamed_files(DATASET)
    assert _texts(files) == [json.loads(line)["text"] for line in (dataset / "train.jsonl").read_text().splitlines()]
    with zstandard.open(files[0], "rt") as lines:
        assert set(json.loads(lines.readline())) == {"text", "messages"}
    before = files[0].stat().st_mtime_ns
    (dataset / "train.jsonl").unlink()
    assert streamed_files(DATASET) == files
    assert files[0].stat().st_mtime_ns == before
    assert len(_texts(streamed_files("hf://org/reviews/default/test?documents=7"))) == 7


def test_a_killed_stream_continues_to_the_same_bytes(dataset, monkeypatch):
    monkeypatch.setattr(hub_datasets, "SHARD_BYTES", 5000)
    whole = {file.name: file.read_bytes() for file in streamed_files(DATASET)}
    assert len(whole) > 5
    shutil.rmtree(dataset.parents[1] / "home")
    real, calls = hub_datasets._line, iter(range(10**6))

    def killed(row: dict[str, object]) -> bytes:
        if next(calls) == 400:
            raise KeyboardInterrupt
        return real(row)

    monkeypatch.setattr(hub_datasets, "_line", killed)
    with pytest.raises(KeyboardInterrupt):
        streamed_files(DATASET)
    assert not hub_datasets.is_streamed(DATASET)
    assert {file.name: file.read_bytes() for file in streamed_files(DATASET)} == whole
    assert next(calls) < 400 + 1 + 1000 - 300  # whole shards were kept


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://org", "expected hf://org/name"),
        ("hf://org/other", "offline mode is enabled"),
        ("hf://org/reviews/default/dev", "dev"),
    ],
)
def test_a_dataset_that_is_not_there_is_refused_in_one_line(name, message, dataset):
    with pytest.raises(DataError, match=message) as fault:
        streamed_files(name)
    assert "\n" not in str(fault.value)


def test_nothing_of_a_dataset_is_run(dataset, tmp_path):
    for name, file in (("script", "script.py"), ("pickled", "rows.tar")):
        folder = tmp_path / "org" / name
        folder.mkdir()
        (folder / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        with pytest.raises(DataError, match=f"hf://org/{name}: "):
            streamed_files(f"hf://org/{name}")
    assert not (tmp_path / "ran").exists()


def test_a_dry_run_streams_nothing(dataset, tokens, tmp_path):
    path = make_run(tmp_path / "run", tmp_path / "none", data__corpora__korean__input=[f"{DATASET}?documents=7"])
    assert faults_of(Inputs(load_config(path), 1)) == []
    assert not (tmp_path / "home").exists()
