"""Drafters by name: one file each, one row of the table each.

A specification is ``name``, ``name:option=value,...`` or ``name:argument,option=value,...``;
``ensemble:[spec,spec,...]`` merges several. The keyword-only parameters of a drafter's class are
its options, so a new drafter needs its file and a row here, nothing else. Other packages add rows
through the entry-point group ``outrider.drafters``.
"""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from outrider.drafters.base import Drafter, DrafterContext
from outrider.errors import ConfigError

DRAFTERS: dict[str, str] = {
    "none": "outrider.drafters.none:NoDraft",
    "ngram": "outrider.drafters.ngram:Ngram",
    "suffix": "outrider.drafters.suffix:Suffix",
    "draft": "outrider.drafters.draft_model:DraftModel",
    "ensemble": "outrider.drafters.ensemble:Ensemble",
}

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def known_drafters() -> dict[str, str]:
    """Name -> "module:class" of every drafter, those of other packages included."""
    others = {entry.name: entry.value for entry in entry_points(group="outrider.drafters")}
    return others | DRAFTERS


def describe() -> list[str]:
    """One line per drafter: its specification with all options and their defaults."""
    lines: list[str] = []
    for name in known_drafters():
        if name == "ensemble":
            lines.append("ensemble:[SPEC,SPEC,...]")
            continue
        parameters = inspect.signature(_factory(name)).parameters.values()
        arguments = [p.name.upper() for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        options = [
            f"{p.name}={p.default}"
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.name != "context"
        ]
        rest = ",".join(arguments + options)
        lines.append(f"{name}:{rest}" if rest else name)
    return lines


def _factory(name: str) -> Any:
    module, _, attribute = known_drafters()[name].partition(":")
    return getattr(import_module(module), attribute)


def make_drafter(spec: str, context: DrafterContext) -> Drafter:
    """The drafter that ``spec`` describes. Raises ConfigError naming the part that is wrong."""
    name, _, rest = spec.strip().partition(":")
    known = known_drafters()
    if name not in known:
        raise ConfigError(f"unknown drafter {name!r} in {spec!r}; known: {', '.join(known)}")
    factory = _factory(name)
    if name == "ensemble":
        return typing.cast(Drafter, factory(spec, _members(spec, rest, context)))
    return _construct(factory, spec, _split(rest), context)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _members(spec: str, rest: str, context: DrafterContext) -> list[Drafter]:
    """A comma starts a new member where the name of a drafter follows, otherwise an option."""
    if not re.fullmatch(r"\[.*\]", rest):
        raise ConfigError(f"drafter {spec!r}: expected ensemble:[spec,spec,...]")
    members: list[str] = []
    for part in _split(rest[1:-1].replace(";", ",")):
        starts = "=" not in part.partition(":")[0] and part.partition(":")[0] in known_drafters()
        if starts or not members:
            members.append(part)
        else:
            members[-1] += "," + part if ":" in members[-1] else ":" + part
    return [
        make_drafter(member, replace(context, stream=number))
        for number, member in enumerate(members)
    ]


def _construct(factory: Any, spec: str, parts: list[str], context: DrafterContext) -> Drafter:
    parameters = inspect.signature(factory).parameters
    hints = typing.get_type_hints(factory.__init__)
    options = {
        name: hints[name]
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "context"
    }
    arguments = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "name"
    ]
    given = [part for part in parts if "=" not in part]
    if len(given) != len(arguments):
        wanted = ", ".join(arguments).upper() or "no argument"
        raise ConfigError(f"drafter {spec!r}: expected {wanted} before the options, got {given}")
    values: dict[str, Any] = {}
    for part in parts:
        if "=" in part:
            key, _, text = part.partition("=")
            if key not in options:
                raise ConfigError(
                    f"drafter {spec!r}: unknown option {key!r}; known: {', '.join(options)}"
                )
            if key in values:
                raise ConfigError(f"drafter {spec!r}: option {key!r} is given twice")
            values[key] = _value(spec, key, text, options[key])
    if "context" in parameters:
        values["context"] = context
    return typing.cast(Drafter, factory(spec, *given, **values))


def _value(spec: str, key: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
    else:
        try:
            return kind(text)
        except ValueError:
            pass
    raise ConfigError(f"drafter {spec!r}: {key} is {text!r}, expected {kind.__name__}")
