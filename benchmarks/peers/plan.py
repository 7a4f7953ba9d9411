"""Which processes a run needs, with which modes, and which of them fit in memory together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from catalog import ENGINES, LLAMA_CPP, PEERS, SERVER_BINARY, Engine, Mode, parse_mode
from prepare import Model, openvino_folder, transformers_folder
from table import OUTRIDER

from outrider.errors import UserError

GIB = 1 << 30
PROCESS = GIB
"""Bytes that an engine takes beside weights: its libraries, keys and values, buffers."""

DTYPE_MEMORY = {"bfloat16": 1.3, "int8": 0.9, "int4": 0.7, "float32": 2.2, "float16": 1.3}
"""What Outrider takes, by the bytes of the weights in bfloat16; they are there while it packs."""

SCRIPTS = Path(__file__).parent / "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One process. ``options``: of its load request. ``memory``: bytes, an estimate."""

    engine: str
    dtype: str
    modes: tuple[Mode, ...]
    command: tuple[str, ...]
    options: Mapping[str, Any] = field(hash=False, compare=False)
    memory: int

    @property
    def name(self) -> str:
        modes = "+".join(mode.spec for mode in self.modes)
        return f"{self.engine} {self.dtype} {modes}"


def peer_specs(
    names: Sequence[str],
    modes: Mapping[str, Sequence[str]],
    model: Model,
    draft: Model | None,
    common: Mapping[str, Any],
) -> tuple[list[Spec], dict[str, str]]:
    """The processes of the engines ``names``, and why those that are missing are.

    ``modes``: specifications by engine, in place of the engine's own. Modes with a draft model
    are left out where there is no draft. Converts the model where an engine needs it.
    """
    specs: list[Spec] = []
    missing: dict[str, str] = {}
    for engine in (ENGINES[name] for name in names):
        if not PEERS[engine.environment].ready:
            missing[engine.name] = (
                f"not set up: python benchmarks/peers/setup.py --only {engine.environment}"
            )
            continue
        try:
            options = {**common, **_files(engine, model, draft)}
        except UserError as error:
            missing[engine.name] = str(error)
            continue
        wanted = [parse_mode(spec) for spec in modes.get(engine.name, engine.modes)]
        wanted = [mode for mode in wanted if draft is not None or mode.name != "draft"]
        groups = [wanted] if engine.together else [[mode] for mode in wanted]
        specs += [_peer_spec(engine, group, options, model, draft) for group in groups if group]
    return specs, missing


def _peer_spec(
    engine: Engine,
    modes: Sequence[Mode],
    options: Mapping[str, Any],
    model: Model,
    draft: Model | None,
) -> Spec:
    drafting = any(mode.name == "draft" for mode in modes)
    weights = model.bfloat16_bytes()
    weights += draft.bfloat16_bytes() if drafting and draft is not None else 0
    return Spec(
        engine=engine.name,
        dtype={"folder": "bfloat16", "ir": "int8", "gguf": model.gguf_dtype}[engine.weights],
        modes=tuple(modes),
        command=(str(PEERS[engine.environment].python), str(SCRIPTS / engine.script)),
        options={**options, "modes": [mode.as_json() for mode in modes]},
        memory=int(engine.memory * weights) + PROCESS,
    )


def _files(engine: Engine, model: Model, draft: Model | None) -> dict[str, Any]:
    """The model's files in the engine's words. Raises UserError."""
    if engine.weights == "folder":
        return {
            "folder": str(transformers_folder(model)),
            "draft_folder": str(transformers_folder(draft)) if draft else None,
        }
    if engine.weights == "ir":
        return {"ir_folder": str(openvino_folder(model))}
    return {
        "gguf": str(model.gguf),
        "gguf_dtype": model.gguf_dtype,
        "draft_gguf": str(draft.gguf) if draft else None,
        "binary": str(PEERS[engine.environment].folder / SERVER_BINARY),
        "version": f"sources of llama-cpp-python {LLAMA_CPP}",
    }


def outrider_specs(
    dtypes: Sequence[str],
    drafters: Sequence[str],
    model: Model,
    draft: Model | None,
    common: Mapping[str, Any],
) -> list[Spec]:
    """One process for each of ``dtypes``, all ``drafters`` in it, plain decoding first."""
    names = list(dict.fromkeys(["none", *drafters]))
    modes = tuple(Mode("plain" if name == "none" else name, name) for name in names)
    weights = model.bfloat16_bytes()
    weights += draft.bfloat16_bytes() if draft is not None else 0
    return [
        Spec(
            engine=OUTRIDER,
            dtype=dtype,
            modes=modes,
            command=(sys.executable, str(SCRIPTS / "on_outrider.py")),
            options={
                **common,
                "model": model.name,
                "dtype": dtype,
                "modes": [mode.as_json() for mode in modes],
            },
            memory=int(DTYPE_MEMORY.get(dtype, 2.2) * weights) + PROCESS,
        )
        for dtype in dict.fromkeys(dtypes)
    ]


def yardstick_of(specs: Sequence[Spec]) -> Spec | None:
    """Plain decoding by the smallest of Outrider's processes: what every group holds, so that
    rates of one group can be compared with those of another. None: Outrider is not measured."""
    own = [spec for spec in specs if spec.engine == OUTRIDER]
    if not own:
        return None
    smallest = min(own, key=lambda spec: spec.memory)
    plain = tuple(mode for mode in smallest.modes if mode.name == "none")
    options = {**smallest.options, "modes": [mode.as_json() for mode in plain]}
    return replace(smallest, modes=plain, options=options)


def pack(specs: Sequence[Spec], limit: int) -> list[list[Spec]]:
    """``specs`` in as few groups as first fit gives, each of at most ``limit`` bytes, with the
    yardstick in each where there are several; what is larger has a group to itself."""
    if sum(spec.memory for spec in specs) <= limit:
        return [list(specs)]
    yardstick = yardstick_of(specs)
    room = limit - (yardstick.memory if yardstick else 0)
    groups: list[list[Spec]] = []
    for spec in sorted(specs, key=lambda spec: -spec.memory):
        for group in groups:
            if sum(other.memory for other in group) + spec.memory <= room:
                group.append(spec)
                break
        else:
            groups.append([spec])
    order = {spec.name: number for number, spec in enumerate(specs)}
    groups = [sorted(group, key=lambda spec: order[spec.name]) for group in groups]
    return [_with(yardstick, group) for group in groups] if yardstick else groups


def _with(yardstick: Spec, group: list[Spec]) -> list[Spec]:
    there = any((s.engine, s.dtype) == (yardstick.engine, yardstick.dtype) for s in group)
    return group if there else [*group, yardstick]


def free_memory() -> int:
    """Bytes that can be had without swapping (Linux)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])
