"""Reads the `quantization_config` of a checkpoint, and dequantizes its tensors when they are read."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.json_file import read_json
from jaxspec.files.leftovers import without_leftovers
from jaxspec.files.quantized.mxfp4 import mxfp4_tensors
from jaxspec.files.quantized.packed_integers import (
    BITS,
    Scheme,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
)
from jaxspec.files.quantized.scaled import scaled_tensors, with_usual_scales

Tensors = Mapping[str, TensorSource]

SETTINGS = ("quantization_config", "compression_config")
"""Keys of a `config.json` that say how weights are quantized; the second is older."""
_DENSE = ("dense", "fakequant")
"""Formats of compressed-tensors for weights that are stored dense, beside their scales."""
_WITHOUT_WEIGHTS = {"quant_method", "version", "sparsity_config", "transform_config"}
"""Keys of a `compression_config` that say nothing about quantized weights."""
_PACKED = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes",
}
"""Tensor-name suffixes of formats that a config may leave out."""
_OLDER_FILES = ("quantize_config.json", "quant_config.json")
"""Files of AutoGPTQ, and of AutoAWQ before it wrote into `config.json`; AutoGPTQ searches in this order."""
_OLDER_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}
"""What AutoAWQ calls keys in its own files."""
_OF_AWQ = (*_OLDER_NAMES.values(), "zero_point", "version")
"""Keys that AutoGPTQ has not."""


def dequantized_tensors(tensors: Tensors, config: Mapping[str, Any], folder: Path) -> dict[str, TensorSource]:
    """Replaces the tensors of every quantized matrix by one, which is dequantized when it is read.

    Args:
      tensors: all tensors of a checkpoint, by name.
      config: the contents of its `config.json`.
      folder: the checkpoint's.

    Raises:
      CheckpointError: the format is not supported, or tensors do not belong together.
    """
    settings = _settings(tensors, config, folder)
    dequantized = dict(tensors)
    if settings:
        method = settings.get("quant_method")
        dequantize = _METHODS.get(method.lower()) if isinstance(method, str) else None
        if dequantize is None:
            raise CheckpointError(
                f"{folder}: weights quantized by {method!r} (quant_method) are not supported; supported: "
                f"{', '.join(name for name in _METHODS if name != 'compressed_tensors')}"
            )
        dequantized = dequantize(without_leftovers(tensors, str(folder)), settings, str(folder))
    for key in dequantized:
        for suffix, method in _PACKED.items():
            if key.endswith(suffix):
                raise CheckpointError(
                    f"{folder}: tensor {key!r} was quantized by {method}, which its quantization_config does "
                    "not say"
                )
    return dequantized


def _settings(tensors: Tensors, config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The `quantization_config`, or what older tools wrote in its place; empty if nothing is quantized."""
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, dict) else {})
    if stated := next(
        (place["quantization_config"] for place in places if place.get("quantization_config")), None
    ):
        settings = _object(stated, "quantization_config", folder)
        of_modelopt = settings.get("quantization")
        if "quant_method" not in settings and isinstance(of_modelopt, dict):
            return {"quant_method": "modelopt", **of_modelopt}
        return settings
    if older := config.get("compression_config"):  # of compressed-tensors
        return {"quant_method": "compressed-tensors", **_object(older, "compression_config", folder)}
    # ModelOpt used to write a file of its own.
    of_modelopt = read_json(folder / "hf_quant_config.json", default={}).get("quantization")
    if isinstance(of_modelopt, dict):
        return {"quant_method": "modelopt", **of_modelopt}
    return _older_settings(folder) if any(key.endswith(".qweight") for key in tensors) else {}


def _older_settings(folder: Path) -> Mapping[str, Any]:
    """The settings in a file that AutoGPTQ or AutoAWQ wrote beside `config.json`; empty without one."""
    files = (read_json(folder / name, default={}) for name in _OLDER_FILES)
    stated = next(filter(None, files), {})
    if not stated:
        return {}
    if any(key in stated for key in _OF_AWQ):
        return {"quant_method": "awq", **stated}
    return {"quant_method": "gptq", "bits": 4, "group_size": -1, **stated}  # AutoGPTQ's defaults


def _object(value: Any, key: str, folder: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder}: {key} must be an object, got {value!r}")
    return value


def _mxfp4(tensors: Tensors, settings: Mapping[str, Any], name: str) -> dict[str, TensorSource]:
    return mxfp4_tensors(tensors, name)


def _fp8(tensors: Tensors, settings: Mapping[str, Any], name: str) -> dict[str, TensorSource]:
    block = settings.get("weight_block_size")
    tensors = with_usual_scales(tensors, name)
    return scaled_tensors(tensors, None if block is None else _block(block, "weight_block_size", name), name)


def _modelopt(tensors: Tensors, settings: Mapping[str, Any], name: str) -> dict[str, TensorSource]:
    if settings.get("quant_algo") is None and settings.get("kv_cache_quant_algo") is not None:
        return dict(tensors)  # only the cache is quantized
    algorithm = _choice(settings, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), None, name)
    return scaled_tensors(tensors, (128, 128) if algorithm == "FP8_PB_WO" else None, name)


def _awq(tensors: Tensors, settings: Mapping[str, Any], name: str) -> dict[str, TensorSource]:
    settings = _with_newer_names(settings, name)
    key = "version" if "version" in settings else "format"
    _choice(settings, key, ("gemm", "GEMM"), "gemm", name)
    bits = _choice(settings, "bits", (4,), 4, name)
    return awq_tensors(tensors, bits, _group(settings, "group_size", name, default=128), name)


def _with_newer_names(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings with AutoAWQ's older names replaced, which AutoGPTQ reads too."""
    renamed = dict(settings)
    for key, older in _OLDER_NAMES.items():
        value = renamed.pop(older, None)
        if value is None:
            continue
        if renamed.setdefault(key, value) != value:
            raise _unsupported(name, older, value, f"the value of {key}, which is {renamed[key]!r}")
    return renamed


def _gptq(tensors: Tensors, settings: Mapping[str, Any], name: str) -> dict[str, TensorSource]:
    settings = _with_newer_names(settings, name)
    _choice(settings, "is_marlin_format", (False,), False, name)
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    version = _choice(settings, key, ("gptq", "gptq_v2"), "gptq", name)
    bits = _choice(settings, "bits", BITS, None, name)
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        raise _unsupported(name, "dynamic", rules, "rules that leave modules out, which begin with '-:'")
    group = _group(settings, "group_size", name)
    return gptq_tensors(tensors, bits, group, 0 if version == "gptq_v2" else 1, name)


def _compressed(tensors: Tensors, settings: Mapping[str, Any], name: str) -> dict[str, TensorSource]:
    for key in ("sparsity_config", "transform_config"):
        given = settings.get(key)
        if given and not (isinstance(given, dict) and given.get("format", None) == "dense"):
            raise _unsupported(name, key, given, "none")
    groups = settings.get("config_groups")
    if not groups and (settings.get("kv_cache_scheme") or settings.keys() <= _WITHOUT_WEIGHTS):
        return dict(tensors)
    if not isinstance(groups, dict) or not groups:
        raise _unsupported(name, "config_groups", groups, "an object of schemes")
    packed: list[Scheme] = []
    blocks: set[tuple[int, int]] = set()
    for label, group in groups.items():
        place = f"config_groups.{label}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unsupported(name, f"{place}.weights", weights, "an object")
        stated = group.get("format") or settings.get("format")
        if stated in _DENSE:
            continue
        formats = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
        if stated not in formats:
            key = f"{place}.format" if group.get("format") else "format"
            raise _unsupported(name, key, stated, ", ".join(formats))
        place = f"{place}.weights"
        kind = _choice(weights, "type", ("int", "float"), "int", name, place)
        bits = _choice(weights, "num_bits", BITS if kind == "int" else (8,), 8, name, place)
        strategies = ("tensor", "channel", "group", "block")
        strategy = _choice(weights, "strategy", strategies, _strategy(weights), name, place)
        if stated == "pack-quantized":
            _choice(weights, "strategy", ("channel", "group"), strategy, name, place)
            size = _group(weights, "group_size", name, place=place) if strategy == "group" else -1
            packed.append(Scheme(bits, size, weights.get("symmetric") is not False))
        elif strategy == "group":
            size = _group(weights, "group_size", name, place=place)
            if size > 0:
                blocks.add((1, size))
        elif strategy == "block":
            blocks.add(_block(weights.get("block_structure"), f"{place}.block_structure", name))
    if len(blocks) > 1:
        raise _unsupported(name, "config_groups", sorted(blocks), "one size of blocks")
    dequantized = compressed_tensors(tensors, packed, name)
    return scaled_tensors(dequantized, next(iter(blocks), None), name)


_METHODS: Mapping[str, Callable[[Tensors, Mapping[str, Any], str], dict[str, TensorSource]]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
}


def _strategy(weights: Mapping[str, Any]) -> str:
    """The strategy of a scheme that states none, as compressed-tensors chooses it."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _choice(
    settings: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any, name: str, place: str = ""
) -> Any:
    """The value of a key, which must be a known one; `default` stands for None."""
    value = settings.get(key)
    if value is None:
        value = default
    if not any(type(value) is type(each) and value == each for each in known):
        key = f"{place}.{key}" if place else key
        raise _unsupported(name, key, value, ", ".join(map(str, known)))
    return value


def _group(
    settings: Mapping[str, Any], key: str, name: str, *, default: int | None = None, place: str = ""
) -> int:
    """The number of inputs that share a scale; -1 for all."""
    value = settings.get(key, default)
    if type(value) is not int or not (value == -1 or 0 < value < 2**31):
        raise _unsupported(
            name, f"{place}.{key}" if place else key, value, "a number of inputs, or -1 for all"
        )
    return value


def _block(value: Any, key: str, name: str) -> tuple[int, int]:
    """The rows and columns that share a scale: [128, 128], or "128x128" in older files."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", value):
        value = [int(part) for part in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value):
        return value[0], value[1]
    raise _unsupported(name, key, value, "the rows and columns that share a scale")


def _unsupported(name: str, key: str, value: Any, known: str) -> CheckpointError:
    return CheckpointError(f"{name}: quantization_config.{key} is {value!r}; supported: {known}")
