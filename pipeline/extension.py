"""What an optional feature may give to the core.

An extension is a package that holds everything of one feature: its commands, checks and model
parts. The core never imports one. It asks `extensions()` at the points that the methods of
`Extension` name, and an extension that has nothing to give at a point leaves the method as it is.

The project's own extensions are the packages of `pipeline.extensions`. Others are found by the
entry point `scale_cpt.extensions` of their distribution (docs/extensions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pipeline.errors import ExtensionError, in_one_line

if TYPE_CHECKING:
    from pipeline.checks.inputs import RunInputs
    from pipeline.config.base import BaseCode
    from pipeline.errors import UserError
    from pipeline.training.observer import Observer
    from pipeline.training.trainer import Trainer

OWN_EXTENSIONS = "pipeline.extensions"
"""The package that lists the project's own extensions, by name only: the core imports none."""
ENTRY_POINT = "scale_cpt.extensions"
"""The group of entry points by which other distributions offer extensions."""

CheckedStage = Literal["every stage", "tokenize", "train", "dry run"]
"""Who makes a check: tokenization, training, the dry run, or each of them before its own."""
InputCheck: TypeAlias = "Callable[[RunInputs], list[UserError] | None]"
"""Checks a run's configuration and files; raises a UserError, or returns several."""


@dataclass(frozen=True)
class Command:
    """A command of `scale-cpt`.

    Attributes:
        summary: one line for the list of commands.
        module: the module with the command's docstring, `add_options` and `main`
            (`pipeline.commands`). It is imported only when the command is called.
        after: the command that it follows in the list of commands.
    """

    summary: str
    module: str
    after: str


@dataclass(frozen=True)
class OfferedMethod:
    """A training method. Both places are `module:name`.

    Attributes:
        settings: its settings, a `pipeline.config.method.MethodSettings` with a literal `name`. The
            module is imported with every run, and imports no torch.
        method: its `pipeline.methods.method.TrainingMethod`, which is made of the settings and the
            run's seed.
    """

    settings: str
    method: str


@dataclass(frozen=True)
class FormatOption:
    """An option of `scale-cpt convert` that has an effect in one format only.

    Attributes:
        flag: such as `--bits`.
        parse: makes its value of the word on the command line; raises ValueError or
            argparse.ArgumentTypeError.
        help: one line for `--help`.
        choices: the values that it may have; empty: all.
    """

    flag: str
    parse: Callable[[str], Any]
    help: str
    choices: Sequence[Any] = ()

    @property
    def name(self) -> str:
        """Its name among `Conversion.options`: `min_count` of `--min-count`."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class OfferedFormat:
    """A format in which `scale-cpt convert` writes a trained model.

    Attributes:
        summary: a few words on what the folder holds.
        export_format: where its `pipeline.conversion.export_format.ExportFormat` is, as
            `module:name`. The module is imported only when a model is converted.
        options: the options that only this format has.
    """

    summary: str
    export_format: str
    options: Sequence[FormatOption] = ()


class Extension:
    """One optional feature. A subclass overrides the methods at which it gives something.

    Its module is imported with every command. So it imports what a method needs within the method.

    Attributes:
        name: its name, as other extensions require it.
        requires: the names of the extensions that it imports.
    """

    name: str
    requires: Sequence[str] = ()

    def commands(self) -> Mapping[str, Command]:
        """Commands of `scale-cpt`, by name. `config init` is added to the core's `config`."""
        return {}

    def input_checks(self, stage: CheckedStage) -> Sequence[InputCheck]:
        """Checks of a run's configuration and files that are made for `stage`, in this order.

        They come after the core's for `stage`. Those for "every stage" come first of all: they need
        no base and no tokenizer.
        """
        return ()

    def methods(self) -> Sequence[OfferedMethod]:
        """Training methods, of which a run chooses one as `method.name`."""
        return ()

    def optimizers(self) -> Mapping[str, str]:
        """Optimizers that a run may choose as `schedule.optimizer`, by name.

        Each is where its `pipeline.optimizers.optimizer.Optimizer` is, as `module:name`.
        """
        return {}

    def base_kinds(self) -> Mapping[BaseCode, str]:
        """Kinds of bases, by the value of `base_code` that chooses them.

        Each is where its `pipeline.model.base_kind.BaseKind` is, as `module:name`.
        """
        return {}

    def export_formats(self) -> Mapping[str, OfferedFormat]:
        """Formats in which `scale-cpt convert` writes a trained model, by name."""
        return {}

    def observers(self, trainer: Trainer) -> Sequence[Observer]:
        """Observers of a run that measure: what they add to the figures of a step is logged.

        Every rank asks for them. They come after the core's that may change the run.
        """
        return ()

    def evaluators(self) -> Mapping[str, str]:
        """What `scale-cpt evaluate` scores models by, beside texts: `tasks` for its option --tasks.

        Each is where its `pipeline.evaluation.evaluator.Evaluator` is, as `module:name`. The module
        is imported with the command's options.
        """
        return {}


def load_object(place: str) -> Any:
    """What stands at a place `module:name`, which an extension has named.

    Raises:
        ExtensionError: the module cannot be imported, or has nothing of that name.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    # It is code of somebody else: whatever it raises is a fault of that extension.
    except Exception as error:
        raise ExtensionError(
            f"{place}: an extension offers it, and it cannot be loaded ({in_one_line(error)}); "
            "repair or uninstall that extension"
        ) from error


def load_instance(place: str, kind: type[Any]) -> Any:
    """The instance of `kind` at a place `module:name`.

    Raises:
        ExtensionError: it cannot be loaded, or is something else, such as a class.
    """
    found = load_object(place)
    if not isinstance(found, kind):
        raise ExtensionError(_mismatch(place, f"an instance of {_name_of(kind)}", found))
    return found


def load_named(place: str, kind: type[Any], name: str) -> Any:
    """The instance of `kind` at a place `module:name`, which an extension offers as `name`.

    Raises:
        ExtensionError: it cannot be loaded, is something else, or has another name.
    """
    found = load_instance(place, kind)
    # What names it later, a group of parameters or a record, has its own name.
    own_name = getattr(found, "name", None)
    if own_name != name:
        raise ExtensionError(
            f"{place}: name: expected {name}, as its extension offers it, found {own_name!r}; "
            "correct that extension"
        )
    return found


def load_class(place: str, kind: type[Any]) -> Any:
    """The subclass of `kind` at a place `module:name`.

    Raises:
        ExtensionError: it cannot be loaded, or is something else, such as an instance.
    """
    found = load_object(place)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ExtensionError(_mismatch(place, f"a subclass of {_name_of(kind)}", found))
    return found


def _mismatch(place: str, expected: str, found: object) -> str:
    if isinstance(found, type):
        what = f"the class {_name_of(found)}"
    else:
        what = f"an object of type {_name_of(type(found))}"
    return (
        f"{place}: an extension offers it, expected {expected}, found {what}; correct that "
        "extension"
    )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def extensions() -> tuple[Extension, ...]:
    """The installed extensions: the project's own, then those of other distributions by name.

    Raises:
        ExtensionError: one cannot be imported, is no `Extension`, has the name of another, or
            requires one that is not installed.
    """
    found: dict[str, Extension] = {}
    for extension in _installed():
        name = extension.name
        if name in found:
            raise ExtensionError(
                f"extension {name}: installed twice, by {_origin(found[name])} and "
                f"{_origin(extension)}; uninstall one of the two"
            )
        found[name] = extension
    for extension in found.values():
        for required in extension.requires:
            if required not in found:
                raise ExtensionError(
                    f"extension {extension.name}: requires the extension {required}, which is not "
                    "installed; install the distribution that has it"
                )
    return tuple(found.values())


def _installed() -> Iterator[Extension]:
    for name in import_module(OWN_EXTENSIONS).NAMES:
        yield import_module(f"{OWN_EXTENSIONS}.{name}").EXTENSION
    for entry_point in sorted(entry_points(group=ENTRY_POINT), key=lambda one: one.name):
        yield _loaded(entry_point)


def _loaded(entry_point: EntryPoint) -> Extension:
    """The extension of another distribution."""
    try:
        extension = entry_point.load()
    # It is code of somebody else: whatever it raises is a fault of that distribution.
    except Exception as error:
        raise ExtensionError(
            f"extension {entry_point.name}: {entry_point.value} cannot be imported "
            f"({in_one_line(error)}); repair or uninstall its distribution"
        ) from error
    if not isinstance(extension, Extension):
        raise ExtensionError(
            f"extension {entry_point.name}: expected {entry_point.value} to be an instance of "
            f"pipeline.extension.Extension, found {type(extension).__name__}"
        )
    return extension


def _origin(extension: Extension) -> str:
    """The module of an extension."""
    return type(extension).__module__
