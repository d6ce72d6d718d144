"""A format of an extension: its options, its name in the log and the record, and its code."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from pipeline import conversion as offered_by_core
from pipeline.conversion import convert as convert_module
from pipeline.conversion.convert import convert
from pipeline.conversion.formats import export_formats
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.errors import ConversionError, ExtensionError
from pipeline.extension import Extension, OfferedFormat, extensions
from tests.bases import STORIES

PLAIN = '''
import torch

from pipeline.conversion.core_formats import Merged


class Plain(Merged):
    """A merged folder of one type."""

    name = "plain"
    chosen_by_auto = False
    has_dtype = False
    has_purpose = False

    def dtype(self, base):
        return torch.float32


PLAIN = Plain()
'''


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Offers the object of a module's source as the format `plain`."""
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)

    def offer(source: str, value: str = "PLAIN") -> None:
        class Plain(Extension):
            name = "plain"

            def export_formats(self):
                return {"plain": OfferedFormat("a merged folder", f"plain_format:{value}")}

        (packages / "plain_format.py").write_text(source)
        monkeypatch.delitem(sys.modules, "plain_format", raising=False)
        monkeypatch.setattr(offered_by_core, "extensions", lambda: (*extensions(), Plain()))
        forget()

    def forget() -> None:
        offered_by_core.offered_formats.cache_clear()
        export_formats.cache_clear()

    yield offer
    monkeypatch.undo()
    forget()


@pytest.fixture
def asked(models, tmp_path) -> Conversion:
    checkpoint = models("stories260K", "adapt norm base").checkpoint
    return Conversion(checkpoint, STORIES, tmp_path / "hf", "plain")


def test_a_purpose_without_effect_is_said_and_a_type_is_refused(offered, asked, caplog):
    offered(PLAIN)
    with pytest.raises(ConversionError, match=r"--dtype .* found format plain, which has one type"):
        convert(replace(asked, dtype=torch.bfloat16), probe_maker({}))
    assert not asked.output.exists()
    with caplog.at_level("INFO"):
        assert convert(replace(asked, purpose="training"), probe_maker({}))
    assert "--for training: the format plain is the same for serving and training" in caplog.text
    assert json.loads((asked.output / "conversion.json").read_text())["written_format"] == "plain"
    assert "| format | plain, float32 |" in (asked.output / "README.md").read_text()


def test_a_format_with_a_purpose_gets_no_word_against_it(offered, asked, caplog):
    offered(PLAIN.replace("has_purpose = False", "has_purpose = True"))
    with caplog.at_level("INFO"):
        assert convert(replace(asked, purpose="training"), probe_maker({}))
    assert "writing" in caplog.text and "the same for serving" not in caplog.text


def test_changed_code_of_the_format_is_converted_again(offered, asked):
    offered(PLAIN)
    assert convert(asked, probe_maker({})) and not convert(asked, probe_maker({}))
    code = json.loads((asked.output / "conversion.json").read_text())["code"]
    assert "plain_format" in code and not [name for name in code if name.startswith("pipeline")]
    offered(f"{PLAIN}# changed\n")
    assert convert(asked, probe_maker({})) and not convert(asked, probe_maker({}))


def test_our_own_formats_record_the_code_that_exports_carry_alone():
    """So that exports of before are not converted again."""
    for format in export_formats().values():
        assert convert_module._hashes_of_extension(format) == {}


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        (
            PLAIN,
            "Plain",
            "plain_format:Plain: an extension offers it, expected an instance of "
            "pipeline.conversion.export_format.ExportFormat, found the class plain_format.Plain; "
            "correct that extension",
        ),
        (
            PLAIN.replace('name = "plain"', ""),
            "PLAIN",
            "plain_format:PLAIN: name: expected plain, as its extension offers it, found 'merged'; "
            "correct that extension",
        ),
    ],
    ids=["class", "name"],
)
def test_what_cannot_be_a_format_ends_in_one_line(offered, source, value, message):
    offered(source, value)
    with pytest.raises(ExtensionError) as fault:
        export_formats()
    assert str(fault.value) == message
