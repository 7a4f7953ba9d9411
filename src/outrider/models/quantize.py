"""Weights of fewer bits on CUDA, through torchao. On the CPU the C++ kernels have their own."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.models.decoder import Decoder

LEAST_CAPABILITY = {"int8": (7, 5), "int4": (8, 0), "fp8": (8, 9)}
"""The formats, and the compute capability that the kernels of each need."""

INT4_GROUPS = (128, 64, 32)
"""Inputs that may share a scale; a linear gets the largest that divides its inputs."""


def check_format(format: str, device: torch.device) -> None:
    """Raise ConfigError unless weights of ``format`` can run on ``device``, a CUDA device."""
    if format not in LEAST_CAPABILITY:
        raise ConfigError(
            f"dtype {format} has no quantised weights on CUDA; possible: "
            f"{', '.join(LEAST_CAPABILITY)}"
        )
    has, needed = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[format]
    if has < needed:
        raise ConfigError(
            f"dtype {format} needs compute capability {_dotted(needed)}, {device} has "
            f"{_dotted(has)}; use bfloat16"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"dtype {format} on CUDA needs torchao; install it with: pip install 'outrider[quant]'"
        )


def quantize(decoder: Decoder, format: str) -> None:
    """Replace the weights of all linears of a bfloat16 ``decoder``, the head included.

    - ``int8``: a scale per output. Saves memory; in torchao's eager kernels no time, as the
      weights are widened for every product.
    - ``int4``: a scale and a zero point per group of 32 to 128 inputs.
    - ``fp8``: e4m3, a scale per output; inputs are rounded to e4m3 too, with a scale per token.

    Raises ConfigError, see :func:`check_format`, and for inputs that int4 cannot group.
    """
    check_format(format, decoder.device)
    configs = {_group(linear, format) for linear in _linears(decoder).values()}
    from torchao.quantization import quantize_

    for group in sorted(configs):
        quantize_(
            decoder,
            _config(format, group),
            filter_fn=lambda module, _, group=group: (
                isinstance(module, nn.Linear) and _group(module, format) == group
            ),
        )


def _linears(decoder: Decoder) -> dict[str, nn.Linear]:
    return {
        name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear)
    }


def _group(linear: nn.Linear, format: str) -> int:
    """Inputs that share a scale in ``linear``; 0 for all of them."""
    if format != "int4":
        return 0
    for group in INT4_GROUPS:
        if linear.in_features % group == 0:
            return group
    raise ConfigError(
        f"dtype int4 needs linears whose inputs are a multiple of {INT4_GROUPS[-1]}, this model "
        f"has one of {linear.in_features}; use int8"
    )


def _config(format: str, group: int) -> Any:
    # Without their settings for the compiler, which also change float32 products elsewhere.
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    if format == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if format == "int4":
        return Int4WeightOnlyConfig(
            group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    return Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), set_inductor_config=False
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
