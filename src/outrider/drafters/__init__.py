"""Drafters by name: one file each, one row of the table each.

A specification is ``name``, ``name:option=value,...`` or ``name:argument,option=value,...``;
``ensemble:[spec,spec,...]`` merges several. The keyword-only parameters of a drafter's class are
its options, so a new drafter needs its file and a row here, nothing else. Other packages add rows
through the entry-point group ``outrider.drafters``.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from dataclasses import dataclass, replace
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
KINDS = (int, float, str, bool)
ALLOWED = "int, float, str, bool, or one of these | None"


def known_drafters() -> dict[str, str]:
    """Name -> "module:class" of every drafter, those of other packages included."""
    others = {entry.name: entry.value for entry in entry_points(group="outrider.drafters")}
    return others | DRAFTERS


def describe() -> list[str]:
    """One line per drafter: its specification with all options and their defaults, or why it
    cannot be used."""
    lines: list[str] = []
    for name in known_drafters():
        try:
            shape = _Shape.of(name)
        except ConfigError as error:  # somebody else's package; the others are still good
            lines.append(f"{name}: cannot be used: {error}")
            continue
        options = [
            f"{key}={'none' if option.default is None else option.default}"
            for key, option in shape.options.items()
        ]
        members = ["[SPEC,SPEC,...]"] if shape.has_members else []
        rest = ",".join([argument.upper() for argument in shape.arguments] + members + options)
        lines.append(f"{name}:{rest}" if rest else name)
    return lines


def make_drafter(spec: str, context: DrafterContext) -> Drafter:
    """The drafter that ``spec`` describes. Raises ConfigError naming the part that is wrong."""
    return parse_spec(spec).make(context)


@dataclass(frozen=True, slots=True)
class Plan:
    """A specification that was understood: what to call, and with what."""

    spec: str
    shape: _Shape
    arguments: tuple[str, ...]
    options: dict[str, Any]
    members: tuple[Plan, ...]

    def make(self, context: DrafterContext) -> Drafter:
        """Make the drafter; members of an ensemble get streams of noise of their own."""
        values = dict(self.options)
        if self.shape.has_context:
            values["context"] = context
        if self.shape.has_members:
            values["members"] = [
                member.make(replace(context, stream=number))
                for number, member in enumerate(self.members)
            ]
        return typing.cast(Drafter, self.shape.factory(self.spec, *self.arguments, **values))


def parse_spec(spec: str) -> Plan:
    """Understand a specification without making anything. Raises ConfigError."""
    name, _, rest = spec.strip().partition(":")
    known = known_drafters()
    if name not in known:
        raise ConfigError(f"unknown drafter {name!r} in {spec!r}; known: {', '.join(known)}")
    shape = _Shape.of(name)
    members: tuple[Plan, ...] = ()
    if shape.has_members:
        match = re.fullmatch(r"\[(.*)\]", rest)
        if match is None:
            raise ConfigError(f"drafter {spec!r}: expected {name}:[spec,spec,...]")
        members = tuple(parse_spec(member) for member in _split_members(match[1]))
        rest = ""
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    arguments = tuple(part for part in parts if "=" not in part)
    if len(arguments) != len(shape.arguments):
        wanted = ", ".join(shape.arguments).upper() or "no argument"
        raise ConfigError(
            f"drafter {spec!r}: expected {wanted} before the options, got "
            f"{', '.join(arguments) or 'none'}"
        )
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals:
            continue
        if key not in shape.options:
            known_options = ", ".join(shape.options) or "none"
            raise ConfigError(f"drafter {spec!r}: unknown option {key!r}; known: {known_options}")
        if key in options:
            raise ConfigError(f"drafter {spec!r}: option {key!r} is given twice")
        options[key] = _value(spec, key, text, shape.options[key])
    return Plan(spec, shape, arguments, options, members)


def _outside_brackets(text: str) -> list[str]:
    """Split at the commas that no bracket is open around."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _split_members(text: str) -> list[str]:
    """Split at the commas that a drafter's name follows; other commas separate its options, and
    those in brackets belong to a member that is an ensemble itself."""
    members: list[str] = []
    for part in (part.strip() for part in _outside_brackets(text) if part.strip()):
        if part.partition(":")[0] in known_drafters() or not members:
            members.append(part)
        else:
            members[-1] += ("," if ":" in members[-1] else ":") + part
    return members


def _value(spec: str, key: str, text: str, option: _Option) -> Any:
    if option.or_none and text.lower() == "none":
        return None
    if option.kind is bool:
        if text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
    else:
        try:
            return option.kind(text)
        except ValueError:
            pass
    expected = option.kind.__name__ + (" or none" if option.or_none else "")
    raise ConfigError(f"drafter {spec!r}: {key} is {text!r}, expected {expected}")


@dataclass(frozen=True, slots=True)
class _Option:
    """A keyword-only parameter: one of KINDS, perhaps or None."""

    kind: type
    or_none: bool
    default: Any

    @classmethod
    def of(cls, where: str, parameter: inspect.Parameter, hint: Any) -> _Option:
        """Raises ConfigError for what no text can be turned into."""
        or_none = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            others = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
            or_none = len(others) < len(typing.get_args(hint))
            hint = others[0] if len(others) == 1 else hint
        if hint not in KINDS:
            given = "no annotation" if hint is None else f"the annotation {hint}"
            raise ConfigError(
                f"{where}: its option {parameter.name!r} has {given}, expected {ALLOWED}"
            )
        if parameter.default is parameter.empty:
            raise ConfigError(f"{where}: its option {parameter.name!r} needs a default")
        return cls(hint, or_none, parameter.default)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a drafter's class takes: arguments, options, and more."""

    factory: Any
    arguments: tuple[str, ...]
    options: dict[str, _Option]
    has_context: bool
    has_members: bool

    @classmethod
    def of(cls, name: str) -> _Shape:
        """Raises ConfigError for a class that cannot be imported or takes something else."""
        where = f"drafter {name!r} ({known_drafters()[name]})"
        factory = _import(where, known_drafters()[name])
        try:
            parameters = inspect.signature(factory).parameters
            hints = typing.get_type_hints(factory.__init__)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise ConfigError(f"{where}: its __init__ cannot be read: {error}") from None
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if positional[:1] != ["name"]:
            raise ConfigError(
                f"{where}: its __init__ must take 'name' first, it takes {positional or 'nothing'}"
            )
        special = ("name", "context", "members")
        return cls(
            factory=factory,
            arguments=tuple(key for key in positional if key not in special),
            options={
                p.name: _Option.of(where, p, hints.get(p.name))
                for p in parameters.values()
                if p.kind is p.KEYWORD_ONLY and p.name not in special
            },
            has_context="context" in parameters,
            has_members="members" in parameters,
        )


def _import(where: str, path: str) -> Any:
    """The class at "module:class". Raises ConfigError whatever its module raises."""
    module, _, attribute = path.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except Exception as error:  # code of another package runs here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where} cannot be imported: {reason}") from None
    if not isinstance(factory, type):
        raise ConfigError(f"{where} is no class")
    return factory
