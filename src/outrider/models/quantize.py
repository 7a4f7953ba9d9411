"""Weights of fewer bits on CUDA, through torchao. On the CPU the C++ kernels have their own."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.models.decoder import Decoder

LEAST_CAPABILITY = {"int8": (7, 5), "int4": (8, 0), "fp8": (8, 9)}
"""The formats, and the compute capability that the kernels of each need."""

INT4_GROUPS = (128, 64, 32)
"""Inputs that may share a scale; a linear gets the largest that divides its inputs."""


FP8_STEP = 16
"""Sizes of a linear are multiples of this in fp8. torchao would leave others as they are."""


def check_format(format: str, device: torch.device) -> None:
    """Raise ConfigError unless weights of ``format``, one of the known ones, can run on
    ``device`` through torchao."""
    if device.type != "cuda":
        raise ConfigError(f"dtype {format} of torchao runs on CUDA only, device is {device}")
    has, needed = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[format]
    if has < needed:
        raise ConfigError(
            f"dtype {format} needs compute capability {_dotted(needed)}, {device} has "
            f"{_dotted(has)}; use bfloat16"
        )
    _torchao(format)


def quantize(decoder: Decoder, format: str) -> None:
    """Replace the weights of all linears of a bfloat16 ``decoder``, the head included, in place.

    - ``int8``: a scale per output. Saves memory; in torchao's eager kernels no time is expected, as
      the weights are widened for every product.
    - ``int4``: a scale and a zero point per group of 32 to 128 inputs.
    - ``fp8``: e4m3, a scale per output; inputs are rounded to e4m3 too, with a scale per token.

    Raises ConfigError, see :func:`check_format`, and for linears of sizes that the format does not
    take; nothing is changed then.
    """
    check_format(format, decoder.device)
    convert(decoder, format)


def convert(decoder: Decoder, format: str) -> None:
    """:func:`quantize` without looking at the device."""
    ao = _torchao(format)
    groups = {_group(linear, format) for linear in _linears(decoder).values()}
    for group in sorted(groups):
        ao.quantize_(
            decoder,
            _config(ao, format, group),
            filter_fn=lambda module, _, group=group: (
                isinstance(module, nn.Linear) and _group(module, format) == group
            ),
        )


def _linears(decoder: Decoder) -> dict[str, nn.Linear]:
    return {
        name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear)
    }


def _group(linear: nn.Linear, format: str) -> int:
    """Inputs that share a scale in ``linear``; 0 for all of them. Raises ConfigError."""
    num_in, num_out = linear.in_features, linear.out_features
    if format == "fp8" and (num_in % FP8_STEP or num_out % FP8_STEP):
        raise ConfigError(
            f"dtype fp8 needs linears whose sizes are multiples of {FP8_STEP}, this model has one "
            f"of {num_in} x {num_out}; use int8"
        )
    if format != "int4":
        return 0
    for group in INT4_GROUPS:
        if num_in % group == 0:
            return group
    raise ConfigError(
        f"dtype int4 needs linears whose inputs are a multiple of {INT4_GROUPS[-1]}, this model "
        f"has one of {num_in}; use int8"
    )


def _config(ao: Any, format: str, group: int) -> Any:
    # Without their settings for the compiler, which also change float32 products elsewhere.
    if format == "int8":
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if format == "int4":
        return ao.Int4WeightOnlyConfig(
            group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    return ao.Float8DynamicActivationFloat8WeightConfig(
        granularity=ao.PerRow(), set_inductor_config=False
    )


def _torchao(format: str) -> Any:
    """torchao's quantization module. Raises ConfigError where it cannot be imported."""
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"dtype {format} on CUDA needs torchao ({reason}); install it with: "
            "pip install 'outrider[quant]'"
        ) from None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
