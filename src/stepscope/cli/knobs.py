"""One option for each knob of a workload, made from the table of knobs: every command that takes a
workload has the same ones."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from stepscope.workloads.spec import KNOBS, knob_default, knob_type, option_name

_PANELS = {
    "What is trained": ("data", "data_path", "image_size", "frames", "length", "classes",
                        "samples", "fraction", "cache", "seed"),
    "How it is loaded": ("batch_size", "accumulate", "workers", "prefetch", "pin", "persistent"),
    "How it is computed": ("framework", "device", "ranks", "precision", "channels_last", "compile",
                           "optimizer", "lr", "momentum", "weight_decay"),
    "How long": ("epochs", "steps", "seconds"),
}  # fmt: skip
_PANEL_OF = {knob: panel for panel, knobs in _PANELS.items() for knob in knobs}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def with_knobs(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Replace the `**knobs` of a command by an option for each knob, but for some."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [_parameter(name) for name in sorted(KNOBS, key=_order) if name not in without]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own] + added

    def wrapper(**values: Any) -> None:
        command(**values)

    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _order(knob: str) -> tuple[int, int]:
    panel = _PANEL_OF[knob]
    return list(_PANELS).index(panel), _PANELS[panel].index(knob)


def _parameter(name: str) -> inspect.Parameter:
    knob, kind = KNOBS[name], knob_type(name)
    plain = next((k for k in typing.get_args(kind) if k is not types.NoneType), kind)
    if plain is bool and knob_default(name) is False:
        names = [option_name(name)]
    elif plain is bool:
        names = [f"{option_name(name)}/--no-{name.replace('_', '-')}"]
    else:
        names = [option_name(name)]
    metavar = None if plain is bool else "|".join(knob.choices) or _METAVARS[plain]
    option = typer.Option(*names, help=knob.help, metavar=metavar, rich_help_panel=_PANEL_OF[name])
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=knob_default(name),
        annotation=Annotated[kind, option],
    )
