"""Models and datasets named on the hub, from a cache folder on this machine; no test needs a
network.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub.utils import filter_repo_objects

from pipeline.checks.checklist import check_stage, faults_of
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import load_config
from pipeline.data.sources.hub_datasets import dataset_files, downloaded_files
from pipeline.errors import BaseModelError, DataError
from pipeline.extensions.first_config.propose import propose
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.hub import model_folder, source_of
from pipeline.sizing.cluster import Cluster
from tests.bases import STORIES
from tests.data.helpers import documents, tokenize, write_jsonl
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import make_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A hub cache that holds a model as org/stories at COMMIT, its branch `main`; the hub itself is
    out of reach.
    """
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
    for path in map(
        Path, ("org/other", "stories", "/org/stories", "a/b/c", "../stories", "~/stories")
    ):
        assert model_folder(path) == path


@pytest.mark.parametrize("weights", [True, False])
def test_what_an_export_keeps_of_a_base_is_fetched(weights, cache, monkeypatch):
    asked: dict[str, list[str]] = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda *_, **options: asked.update(options) or str(cache),
    )
    model_folder(Path("org/stories"), weights=weights)
    described = [
        "config.json",
        "README.md",
        "tokenizer.model",
        "tokenizer.model.v3",
        "merges.txt",
        "qwen.tiktoken",
    ]
    terms = [
        "LICENSE",
        "LICENSE.txt",
        "Licence.md",
        "NOTICE",
        "USE_POLICY.md",
        "ACCEPTABLE_USE_POLICY.md",
    ]
    others = [
        "modeling_x.py",
        "pytorch_model.bin",
        "original/consolidated.safetensors",
        "consolidated.safetensors",
    ]
    wanted = [*described, *terms, *(["model-00001-of-00002.safetensors"] if weights else [])]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert [*filter_repo_objects([*wanted, *others], **patterns)] == wanted


@pytest.mark.parametrize("name", ["org/other", "org/stories@v9", "org/stories@" + "f" * 40])
def test_what_the_cache_lacks_is_refused_in_one_line(name, cache):
    with pytest.raises(
        BaseModelError, match=f"{name}: no such folder here.*HF_HUB_OFFLINE"
    ) as fault:
        model_folder(Path(name))
    assert "\n" not in str(fault.value)


def test_a_run_and_a_first_configuration_name_their_base_on_the_hub(cache, tokens, tmp_path):
    path = make_run(tmp_path / "run", tokens)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "base": "org/stories"}))
    assert load_config(path, base="named").base == Path("org/stories")
    config = load_config(path)
    assert config.base == config.tokenizer == cache
    inputs = check_stage(config, 1, "train")
    assert inputs.base.path == cache
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "base": "org/other"}))
    with pytest.raises(BaseModelError, match="org/other: no such folder here"):
        check_stage(load_config(path), 1, "train")
    wanted = FirstRun(
        "first", Path("org/stories@main"), [str(REVIEWS_HELDOUT)], [str(STORIES_HELDOUT)]
    )
    config, text = propose(wanted, Cluster(1, gpu_memory_gib=4.0, on_cpu=True))
    assert config.base == cache
    assert yaml.safe_load(text)["base"] == "org/stories@main"


# --- Datasets ---

DATASET = "hf://org/reviews/default/train"


class HubOfOneSize:
    """The hub as a file system, of which every file has a mebibyte."""

    def info(self, url: str) -> dict[str, object]:
        assert url.startswith("hf://datasets/org/reviews@")
        return {"size": 2**20}


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> Path:
    """The dataset org/reviews as a hub would hold it, and an empty HF_HOME. Each download of a file
    is its only one.
    """
    folder = tmp_path / "hub" / "reviews"
    folder.mkdir(parents=True)
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", documents(50, seed=number))

    def builder(repo: str, config: str | None, revision: str | None) -> SimpleNamespace:
        if repo != "hf://datasets/org/reviews":
            raise ConnectionError(f"no {repo}")
        urls = [f"{repo}@{revision or COMMIT}/{number}.jsonl" for number in range(3)]
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": urls, "test": urls[:1]}))

    def download(repo: str, path: str, *, repo_type: str, revision: str) -> str:
        here = tmp_path / "home" / "hub" / revision / path
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tmp_path / "hub" / "reviews" / path, here)
        return str(here)

    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.load_dataset_builder", builder)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.HfFileSystem", HubOfOneSize)
    return folder


def test_a_dataset_is_downloaded_once_and_read_in_order(dataset, tmp_path):
    for _ in range(2):
        files = dataset_files(DATASET)
        assert [file.name for file in files] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert files[0].parent.name == COMMIT
    assert tokenize(tmp_path / "tokens", DATASET).documents == 150
    files[0].unlink()
    assert downloaded_files(DATASET) is None


def test_the_size_of_a_download_is_said_first(dataset, caplog):
    with caplog.at_level(logging.INFO, logger="pipeline"):
        dataset_files(DATASET)
    assert f"{DATASET}: downloads 3 files, 3 MiB" in caplog.text


def test_some_files_of_a_split_of_a_revision(dataset, tmp_path):
    (file,) = dataset_files("hf://org/reviews@v2/test")
    assert file.parent.name == "v2"
    write_jsonl(dataset / "0.jsonl", documents(50))
    assert tokenize(tmp_path / "tokens", "hf://org/reviews?files=2").documents == 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://org", "expected hf://org/name"),
        ("hf://org/reviews/default/train?rows=3", "expected hf://org/name"),
        ("hf://org/other", "cannot be downloaded .*no hf://datasets/org/other"),
        ("hf://org/reviews/default/dev", "no files of a split 'dev'; it has train, test"),
    ],
)
def test_a_dataset_that_is_not_there_is_refused_in_one_line(name, message, dataset):
    with pytest.raises(DataError, match=message) as fault:
        dataset_files(name)
    assert "\n" not in str(fault.value)


def test_neither_a_folder_of_that_name_nor_its_code_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "script"
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    write_jsonl(folder / "train.jsonl", ["text"])
    with pytest.raises(DataError, match="hf://org/script: cannot be downloaded"):
        dataset_files("hf://org/script")
    assert not (tmp_path / "ran").exists()


def test_a_dry_run_downloads_nothing(dataset, tmp_path):
    path = make_run(
        tmp_path / "run", tmp_path / "none", data__corpora__korean__input=[f"{DATASET}?files=2"]
    )
    assert faults_of(RunInputs(load_config(path), 1)) == []
    assert not (tmp_path / "home").exists()
