"""Calls of a model's modules, recorded in one forward pass, and the same call made once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeline.extensions.hosted.structure import HIDDEN_STATES

Change = Callable[[Tensor], Tensor]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: the module.
        args, kwargs: its arguments; tensors are copies, because some layers write into theirs.
        result: its result, with a copy of the main tensor.
        result_afterwards: the main tensor itself, with what the rest of the forward pass has
            written into it.
        place: how many calls had started before this one.
        argument: which argument holds the hidden states: an index among `args`, or a keyword. None:
            no argument has one row for each token.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    result_afterwards: Any
    place: int
    argument: int | str | None

    @property
    def hidden(self) -> Tensor:
        """The module's input: the argument with the hidden states."""
        if isinstance(self.argument, int):
            return self.args[self.argument]
        assert self.argument is not None, "blocks and maps are calls with hidden states"
        return self.kwargs[self.argument]

    @property
    def output(self) -> Any:  # a tensor of most modules
        """The main tensor of the result."""
        return main_tensor(self.result)

    @property
    def was_written_to(self) -> bool:
        """Whether the layer wrote into the result afterwards, as Falcon adds its attention."""
        if not isinstance(self.result_afterwards, Tensor):
            return False
        return bool(differs(self.result_afterwards, self.output).any())

    @torch.no_grad()
    def again(self, change: Change, tokens: int, *, every_argument: bool = False) -> Tensor:
        """The main tensor that the module gives for changed hidden states.

        Args:
            change: makes the changed tensor; it gets a copy.
            tokens: the number of tokens of the batch.
            every_argument: whether every argument with a row for each token is changed, or the
                hidden states alone.
        """

        def changed_or_copied(key: int | str, value: Any) -> Any:
            if key == self.argument or (every_argument and has_token_rows(value, tokens)):
                return change(value.clone())
            return _copy(value)

        args = [changed_or_copied(index, value) for index, value in enumerate(self.args)]
        kwargs = {}
        for name, value in self.kwargs.items():
            kwargs[name] = changed_or_copied(name, value)
        return main_tensor(self.module(*args, **kwargs))


Calls = dict[nn.Module, list[Call]]


def main_tensor(result: Any) -> Any:  # a tensor of most modules
    """The tensor that a module's result carries: the result, or the first item of a tuple."""
    if isinstance(result, (tuple, list)) and len(result) > 0:
        return result[0]
    return result


def with_main_tensor(result: Any, tensor: Tensor) -> Any:
    """`result` with another main tensor."""
    if not isinstance(result, (tuple, list)) or not len(result):
        return tensor
    items = [tensor, *result[1:]]
    if hasattr(result, "_fields"):  # a named tuple
        return type(result)(*items)
    return type(result)(items)


def has_token_rows(value: Any, tokens: int, *, integers: bool = False) -> bool:
    """Whether `value` is a tensor [B, S, E] or [B * S, E] of `tokens` rows.

    It has floating-point numbers, or with `integers` any.
    """
    if not isinstance(value, Tensor) or value.dim() not in {2, 3}:
        return False
    if not integers and not value.is_floating_point():
        return False
    return value.shape[:-1].numel() == tokens


def differs(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Where two tensors differ by more than rounding, relative to the largest element."""
    expected = torch.nan_to_num(expected.float())
    found = torch.nan_to_num(found.float())
    return (found - expected).abs() > tolerance * (1e-6 + expected.abs().max())


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """The parameters with two dimensions or more: linear maps, convolutions, experts.

    A module without any is a norm, an activation or a dropout.
    """
    return [parameter for parameter in module.parameters() if parameter.dim() >= 2]


@contextmanager
def hooks() -> Iterator[list[RemovableHandle]]:
    """A list of hooks, which are removed at the end of the block."""
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def record(model: nn.Module, inputs: Mapping[str, Any]) -> Calls:
    """Runs `model(**inputs)` and records the calls of every module, in order."""
    calls: Calls = {}
    running: dict[nn.Module, list[tuple[int, tuple[Any, ...], dict[str, Any]]]] = {}
    tokens = inputs["input_ids"].numel()
    started = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal started
        copied_args = tuple(_copy(value) for value in args)
        copied_kwargs = {name: _copy(value) for name, value in kwargs.items()}
        running.setdefault(module, []).append((started, copied_args, copied_kwargs))
        started += 1

    def after(
        module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any
    ) -> None:
        place, args, kwargs = running[module].pop()
        tensor = main_tensor(result)
        call = Call(
            module=module,
            args=args,
            kwargs=kwargs,
            result=with_main_tensor(result, _copy(tensor)),
            result_afterwards=tensor,
            place=place,
            argument=_hidden_argument(args, kwargs, tokens),
        )
        calls.setdefault(module, []).append(call)

    with hooks() as handles:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        model(**inputs)
    return calls


def called_children(module: nn.Module, calls: Calls) -> list[nn.Module]:
    """The nearest modules within `module` that were called, in the order of their calls.

    A container that is never called itself, as a ModuleList, is looked through.
    """
    found = list(_called_within(module, calls))
    return sorted(found, key=lambda child: calls[child][0].place)


def _called_within(module: nn.Module, calls: Calls) -> Iterable[nn.Module]:
    for child in module.children():
        if child in calls:
            yield child
        else:
            yield from _called_within(child, calls)


def _hidden_argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: int
) -> int | str | None:
    """Which argument holds the hidden states: the first with a row for each token."""
    for index, value in enumerate(args):
        if has_token_rows(value, tokens):
            return index
    if has_token_rows(kwargs.get(HIDDEN_STATES), tokens):
        return HIDDEN_STATES
    for name, value in kwargs.items():
        if name != "attention_mask" and has_token_rows(value, tokens):
            return name
    return None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
