"""A checkpoint of an earlier version is of the same run; one of other settings is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.manifest import (
    MANIFEST_FILE,
    PATHS,
    SAME_MODEL,
    BaseRecord,
    CheckpointManifest,
    Fp8Record,
    LayoutRecord,
    RunRecord,
    check_same_run,
    load_manifest,
    not_recorded,
)
from pipeline.checkpoint.position import CoolDown, Position, StepRecord
from pipeline.config.data import Data
from pipeline.config.method import Lora
from pipeline.errors import CheckpointError, DamagedCheckpointError
from tests.files import change_json

SAMPLED = {"role": "self_generated", "sample": {"tokens": 100}}
DATA = {"folder": "t", "sequence_length": 8, "corpora": {"ko": {"input": ["a"]}, "own": SAMPLED}}
LAYOUT = LayoutRecord(world_size=1, tp_size=1, dp_size=1, zero_stage=1, dtype="float32")


def record() -> RunRecord:
    return RunRecord(
        name="r",
        base=BaseRecord(path="b", hashes={}),
        method=Lora(name="lora", rank=4).model_dump(mode="json"),
        expansion=None,
        data=Data.model_validate(DATA).model_dump(mode="json", exclude=PATHS),
        global_batch_size=1,
        seed=0,
        tokenizer_fingerprint="t",
    )


def manifest(run: RunRecord) -> CheckpointManifest:
    return CheckpointManifest(run=run, position=Position(), layout=LAYOUT, versions={}, files={})


def test_settings_that_did_not_exist_when_it_was_saved_have_their_defaults(tmp_path):
    saved = record()
    del saved.data["corpora"]["own"]["sample"]["seed"]
    del saved.data["corpora"]["ko"]["document"]
    del saved.data["document_mask"]
    del saved.method["target_modules"]
    check_same_run(manifest(saved), tmp_path, record())

    saved.data["corpora"]["own"]["sample"]["temperature"] = 0.7
    with pytest.raises(
        CheckpointError,
        match=r"data\.corpora\.own\.sample\.temperature \(expected 0\.7, found 1\.0\)",
    ):
        check_same_run(manifest(saved), tmp_path, record())


def test_settings_of_the_schedule_are_named_as_the_configuration_has_them(tmp_path):
    for name, value in (("optimizer", "muon"), ("global_batch_size", 2)):
        other = record().model_copy(update={name: value})
        with pytest.raises(CheckpointError, match=rf"another schedule\.{name} \(expected "):
            check_same_run(manifest(record()), tmp_path, other)


def test_another_scaling_of_a_base_in_fp8_is_another_base(tmp_path):
    """A checkpoint without the entry is from when bases in fp8 had a scale for each row."""
    saved = record().model_dump(mode="json") | {"base_precision": "fp8"}
    del saved["fp8"]
    earlier = manifest(RunRecord.model_validate(saved))
    by_rows = record().model_copy(update={"base_precision": "fp8"})
    check_same_run(earlier, tmp_path, by_rows)
    by_tensor = by_rows.model_copy(update={"fp8": Fp8Record(scaling="tensor")})
    with pytest.raises(
        CheckpointError, match=r"another fp8\.scaling \(expected 'row', found 'tensor'\)"
    ):
        check_same_run(earlier, tmp_path, by_tensor)


def test_settings_under_their_earlier_names_are_the_same(tmp_path):
    saved = record()
    own = saved.data["corpora"]["own"]
    own["role"] = "rehearsal"
    own["sample"]["opening_tokens"] = own["sample"].pop("prompt_tokens")
    saved.data["rehearsal_fraction"] = saved.data.pop("self_generated_fraction")
    check_same_run(manifest(saved), tmp_path, record())

    saved.data["rehearsal_fraction"] = 0.5
    with pytest.raises(CheckpointError, match=r"data\.self_generated_fraction \(expected 0\.5"):
        check_same_run(manifest(saved), tmp_path, record())


def test_a_checkpoint_of_a_base_with_other_weights_is_refused(tmp_path):
    other = record().model_copy(
        update={"base": BaseRecord(path="b", hashes={"model.safetensors": "0"})}
    )
    with pytest.raises(
        CheckpointError, match="its base b had other weights than the configuration's base"
    ):
        check_same_run(manifest(other), tmp_path, record())


def test_a_corpus_that_came_or_went_is_a_matter_of_the_settings_alone(tmp_path):
    saved = record().model_copy(update={"corpora": {"ko": "1", "en": "2"}})
    now = record().model_copy(update={"corpora": {"ko": "1", "de": "3"}})
    check_same_run(manifest(saved), tmp_path, now)
    check_same_run(manifest(saved), tmp_path, record())
    other = now.model_copy(update={"corpora": {"ko": "9"}})
    with pytest.raises(
        CheckpointError, match="when the corpus ko held other tokens than it holds now"
    ):
        check_same_run(manifest(saved), tmp_path, other)
    check_same_run(manifest(saved), tmp_path, other, SAME_MODEL)  # a finished run reads none
    assert not_recorded(manifest(record())) == [
        "the config.json of its base",
        "the tokens of its corpora",
    ]


def test_a_manifest_that_was_changed_is_damaged(tmp_path):
    written = manifest(record())
    written.save(tmp_path)
    assert load_manifest(tmp_path) == written

    change_json(tmp_path / MANIFEST_FILE, position={"step": 7})
    with pytest.raises(DamagedCheckpointError, match="does not match its checksum"):
        load_manifest(tmp_path)


def test_a_manifest_of_an_earlier_version_has_no_checksum(tmp_path):
    written = manifest(record())
    (tmp_path / MANIFEST_FILE).write_text(written.model_dump_json())
    assert load_manifest(tmp_path) == written


numbers = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 2**53)
positions = st.builds(
    Position,
    step=counts,
    tokens_seen=counts,
    seconds=numbers,
    skipped_steps=st.lists(counts, max_size=3).map(tuple),
    learning_rate_factor=numbers,
    initial_nll_per_token=st.dictionaries(st.text(max_size=5), numbers, max_size=3),
    recent=st.lists(st.builds(StepRecord, counts, numbers, numbers), max_size=3).map(tuple),
    lowest_nll_per_token=st.none() | numbers,
    cool_down=st.none() | st.builds(CoolDown, counts, counts, numbers),
)


@given(positions)
def test_every_position_is_read_as_it_was_written(position):
    with TemporaryDirectory() as name:
        folder = Path(name)
        manifest(record()).model_copy(update={"position": position}).save(folder)
        # As text, for NaN is not equal to itself.
        assert repr(load_manifest(folder).position) == repr(position)


def test_settings_that_are_not_finite_are_the_same_when_a_run_resumes(tmp_path):
    run = record().model_copy(update={"method": {"name": "lora", "rank": 4, "alpha": math.inf}})
    manifest(run).save(tmp_path)
    check_same_run(load_manifest(tmp_path), tmp_path, run)
    with pytest.raises(CheckpointError, match="alpha"):
        check_same_run(load_manifest(tmp_path), tmp_path, record())


def test_a_score_that_an_earlier_version_wrote_as_null_is_read(tmp_path):
    position = Position(step=3, initial_nll_per_token={"ko": 2.0, "en": math.nan})
    manifest(record()).model_copy(update={"position": position}).save(tmp_path)
    path = tmp_path / MANIFEST_FILE
    values = json.loads(path.read_text())
    assert values["position"]["initial_nll_per_token"]["en"] == "NaN"
    values["position"]["initial_nll_per_token"]["en"] = None
    del values["checksum"]
    path.write_text(json.dumps(values))
    assert repr(load_manifest(tmp_path).position) == repr(position)


def test_another_code_of_the_base_is_named_as_its_setting(tmp_path):
    hosted = record().model_copy(update={"is_hosted": True})
    with pytest.raises(
        CheckpointError, match=r"another base_code \(expected 'native', found 'transformers'\)"
    ):
        check_same_run(manifest(record()), tmp_path, hosted)
