"""Command-line options for the settings of a workload, the same in all commands."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from stepscope.workloads.spec import SETTINGS, option_name, setting_default, setting_type

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|FILE:FUNC",
        help="cnn, lstm, a torchvision model (resnet50, vit_b_16, r3d_18 …) or your own function: "
        "train.py:workload, package.module:workload",
    ),
]
_PANELS = {
    "Workload and data": (
        "data data_path image_size frames sequence_length classes samples fraction page_cache seed"
    ),
    "Data loading": "batch_size workers prefetch pin persistent",
    "Compute": (
        "framework device ranks accumulate precision channels_last compile optimizer lr momentum "
        "weight_decay"
    ),
    "Duration": "epochs steps seconds",
}
_PANEL_OF = {setting: panel for panel, settings in _PANELS.items() for setting in settings.split()}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def with_settings(
    command: Callable[..., None], rejected: Collection[str] = ()
) -> Callable[..., None]:
    """Replace the `**settings` of a command by an option for each setting.

    Options of `rejected` settings are hidden. The command gets their value only if a user passes
    one, and can explain why it is not accepted.
    """
    signature = inspect.signature(command, eval_str=True)
    explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    in_order = sorted(SETTINGS, key=list(_PANEL_OF).index)
    added = [_rejected(name) if name in rejected else _parameter(name) for name in in_order]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in explicit] + added

    def wrapper(**values: Any) -> None:
        command(**{k: v for k, v in values.items() if k not in rejected or v is not None})

    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _rejected(name: str) -> inspect.Parameter:
    option = typer.Option(option_name(name), hidden=True)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _parameter(name: str) -> inspect.Parameter:
    setting, kind = SETTINGS[name], setting_type(name)
    plain = next((k for k in typing.get_args(kind) if k is not types.NoneType), kind)
    names = option_name(name)
    if plain is bool and setting_default(name) is not False:
        names += f"/--no-{name.replace('_', '-')}"
    metavar = None if plain is bool else "|".join(setting.choices) or _METAVARS[plain]
    option = typer.Option(
        names, help=setting.help, metavar=metavar, rich_help_panel=_PANEL_OF[name]
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=setting_default(name),
        annotation=Annotated[kind, option],
    )
