"""What a model is loaded into: the type of its weights, the device, the memory."""

from __future__ import annotations

import os

import torch

from outrider.errors import ConfigError
from outrider.models.config import DecoderConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = ("int8", "int4", "fp8")
"""Formats of weights; everything else of such a model is bfloat16 or wider."""

CUDA_ONLY = ("fp8",)

DEVICES = ("cpu", "cuda")
DEFAULT_SLOTS = 2 * 8192


def weight_format(dtype: str | torch.dtype) -> str:
    """The name of a type of weights. Raises ConfigError."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES and name not in QUANTISED:
        raise ConfigError(f"dtype is {name!r}, possible: {', '.join([*DTYPES, *QUANTISED])}")
    return name


def read_dtype(format: str) -> torch.dtype:
    """The type that weights of a format are read in."""
    return DTYPES.get(format, torch.bfloat16)


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if it is of a known kind and there. Raises ConfigError."""
    if str(device).partition(":")[0] not in DEVICES:
        raise ConfigError(f"device is {str(device)!r}, possible: {', '.join(DEVICES)}")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"device is {str(device)!r}, which cannot be used: {lines[0]}") from None
    return place


def memory(device: torch.device) -> int:
    """Bytes of memory: free on an accelerator, built in for the CPU (4 GiB if not known)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def kv_slots(
    wanted: int | None, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Slots of the KV pool: ``wanted``, or enough for two sequences of the context or of 8192
    tokens in at most a quarter of the memory. Raises ConfigError if model and pool cannot fit."""
    available = memory(device)
    per_slot = config.numbers_per_slot * dtype.itemsize
    slots = wanted
    if slots is None:
        most = min(2 * config.context_length, DEFAULT_SLOTS)
        slots = max(256, min(most, available // 4 // per_slot))
    needed = dtype.itemsize * config.num_weights + slots * per_slot
    if needed > available:
        raise ConfigError(
            f"{config.num_weights:,} weights and {slots:,} KV slots need {needed / 2**30:,.1f} GiB "
            f"of memory, there are {available / 2**30:,.1f}; take a smaller model or --num-slots"
        )
    return slots
