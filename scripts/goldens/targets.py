"""Targets: transformers' models with random weights, every layer's input captured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from goldens.target_cases import CASES

BATCH, LENGTH, NUM_GREEDY = 2, 48, 64
PROMPTS, PROMPT_LENGTH = 8, 24
MARGIN = 2e-4
"""By how much the best logit must be ahead at every greedy step, in parts of the largest."""
PACKED = ("gate_up_proj", "down_proj")
"""The experts' tensors that `gpt-oss-mxfp4` has as blocks."""


def random_weight(name: str, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights 1 + N(0, 0.3), everything else N(0, 0.2)."""
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.3 * noise if "norm" in name else 0.2 * noise


def build(case: str) -> tuple[PreTrainedModel, Tensor]:
    """The model of a case with random weights, and its prompts [B,S]."""
    of = CASES[case]
    model_class: Any = getattr(transformers, of.model)
    model = model_class(model_class.config_class(**of.config, attn_implementation="eager"))
    generator = torch.Generator().manual_seed(of.seed)
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    for family, prepare in PREPARE.items():
        if of.model.startswith(family):
            prepare(model, generator)
    if case == "gpt-oss-mxfp4":
        pack_experts(model, generator)
    vocabulary = model.config.get_text_config().vocab_size
    return model.eval(), torch.randint(3, vocabulary, (BATCH, LENGTH), generator=generator)


def run(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Tensor]:
    """Logits [B,S,V], `hidden` [L+1,B,S,M] and `normed` [B,S,M] for `input_ids` [B,S].

    `hidden[i]` enters layer i (capture id i); `hidden[L]` leaves the last layer; `normed` is its final norm.
    """
    text = getattr(model.model, "language_model", model.model)
    names = ("embedding_norm", "norm_f", "norm")
    last_norm = next(getattr(text, name) for name in names if hasattr(text, name))
    hidden: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append((args[0] if args else kwargs["hidden_states"]).clone()),
            with_kwargs=True,
        )
        for module in [*text.layers, last_norm]
    ]
    with torch.no_grad():
        output = model(input_ids, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {"logits": output.logits, "hidden": torch.stack(hidden), "normed": output.hidden_states[-1]}


def write(root: Path, case: str) -> None:
    """Writes `root/<case>/checkpoint` and `root/<case>/outputs.safetensors`."""
    of, folder = CASES[case], root / case
    model, input_ids = build(case)
    tensors = {"input_ids": input_ids, **run(model, input_ids)}
    model.save_pretrained(folder / "checkpoint", max_shard_size=of.shards)
    if of.greedy:
        answers = [continued(model, input_ids[:, :length], MARGIN) for length in of.greedy]
        tensors |= {"greedy_lengths": torch.tensor(of.greedy), "greedy": torch.stack(answers, dim=1)}
    if of.answers:
        generator = torch.Generator().manual_seed(of.seed)
        vocabulary = model.config.get_text_config().vocab_size
        prompts = torch.randint(3, vocabulary - 8, (PROMPTS, PROMPT_LENGTH), generator=generator)
        tensors |= {"prompts": prompts, "answers": continued(model, prompts)}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "outputs.safetensors")
    if finish := FINISH.get(case):
        finish(folder / "checkpoint", model)


@torch.no_grad()
def continued(model: PreTrainedModel, texts: Tensor, margin: float | None = None) -> Tensor:
    """Greedy continuations [B, 64] of texts [B, S], each token from a pass over the whole text.

    Raises:
      ValueError: at some step two tokens are so close that rounding could decide: take another seed.
    """
    for _ in range(NUM_GREEDY):
        logits = model(texts, use_cache=False).logits[:, -1]
        best = logits.topk(2).values
        ahead = ((best[:, 0] - best[:, 1]) / logits.abs().amax(dim=-1)).min().item()
        if margin is not None and ahead < margin:
            raise ValueError(f"two tokens are {ahead:.1e} apart after {texts.shape[1]} tokens")
        texts = torch.cat([texts, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return texts[:, -NUM_GREEDY:]


def _tie(parameters, first: int, second: int) -> None:
    """Makes two experts identical, since `torch.topk` leaves open which of two equal ones it takes."""
    for parameter in parameters:
        parameter.data[second] = parameter.data[first]


def _qwen3_moe(model: PreTrainedModel, generator: torch.Generator) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            _tie(layer.mlp.parameters(), 2, 5)


def _gemma3(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Gemma stores the weights of norms as offsets from 1."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def _gemma4(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draws the factors of layers, which are no parameters, and keeps those of experts near 1."""
    for layer in model.model.layers:
        layer.layer_scalar.data = 0.7 + 0.3 * torch.rand(1, generator=generator)
        if layer.enable_moe_block:
            for scale in (layer.router.scale, layer.router.per_expert_scale):
                scale.data += 1


def _deepseek(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Router biases that change the choice of experts, equal experts and, of four groups, two equal ones."""
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        gate = layer.mlp.gate
        gate.weight.data = gate.weight.data * 3
        bias = gate.e_score_correction_bias
        bias.data = 0.3 * torch.randn(bias.shape, generator=generator)
        for tensor in (gate.weight, bias, *layer.mlp.experts.parameters()):
            tensor.data[2] = tensor.data[1]
            if gate.num_group == 4:
                tensor.data[4:6] = tensor.data[0:2]


def _nemotron(model: PreTrainedModel, generator: torch.Generator) -> None:
    """States that remember for different times, biases on the choice of experts, and experts that tie."""
    every = [*model.named_parameters(), *model.named_buffers()]
    for name, parameter in every:
        if name.endswith("A_log"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 1.5 - 2
        elif name.endswith(("dt_bias", "mixer.D")):
            parameter.data = torch.randn(parameter.shape, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    _tie([each for name, each in every if "mixer.experts." in name or ".mixer.gate." in name], 2, 5)


def _qwen3_next(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Norms that are offsets from 1, states that remember for different times, and experts that tie."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            parameter.data -= 1
        elif name.endswith("A_log"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 1.5 - 2
        elif name.endswith("dt_bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
        elif "mlp.experts." in name or name.endswith("mlp.gate.weight"):
            _tie([parameter], 2, 5)


def _gpt_oss(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Sinks that matter, experts that reach the clamp of 7, and a tie of two experts in every layer."""
    for layer in model.model.layers:
        sinks = layer.self_attn.sinks
        sinks.data = torch.randn(sinks.shape, generator=generator)
        layer.mlp.experts.gate_up_proj.data *= 8
        layer.mlp.experts.down_proj.data /= 8
        _tie(layer.mlp.parameters(), 1, 2)


def _minimax(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Router biases that change the choice of experts."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.data = 0.3 * torch.randn(bias.shape, generator=generator)


def _lfm2(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Convolutions that see far."""
    for name, weight in model.named_parameters():
        if name.endswith("conv.conv.weight"):
            weight.data *= 3


PREPARE: dict[str, Callable[[PreTrainedModel, torch.Generator], None]] = {
    "Qwen3Moe": _qwen3_moe,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma4": _gemma4,
    "DeepseekV3": _deepseek,
    "Glm4MoeLite": _deepseek,
    "NemotronH": _nemotron,
    "Qwen3Next": _qwen3_next,
    "Qwen3_5": _qwen3_next,
    "GptOss": _gpt_oss,
    "MiniMaxM2": _minimax,
    "Lfm2": _lfm2,
}
"""What changes some of the weights that were drawn, by the beginning of the class's name."""


def pack_experts(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Gives a model the values of random MXFP4 experts, and keeps these as `model.packed`.

    They are blocks u8[E, out, in/32, 16] and exponents u8[E, out, in/32] of experts [E, in, out].
    """
    model.packed = {}
    for i, layer in enumerate(model.model.layers):
        for name in PACKED:
            parameter = getattr(layer.mlp.experts, name)
            experts, width, out = parameter.shape
            shape = (experts, out, width // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape[:-1], generator=generator, dtype=torch.uint8)
            _tie([blocks, scales], 1, 2)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            key = f"model.layers.{i}.mlp.experts.{name}"
            model.packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}


def _write_packed(folder: Path, model: PreTrainedModel) -> None:
    """Stores the experts as MXFP4; the outputs are those of their values."""
    file, path = folder / "model.safetensors", folder / "config.json"
    stems = {key.rsplit("_", 1)[0] for key in model.packed}
    kept = {key: tensor for key, tensor in load_file(file).items() if key not in stems}
    save_file({**kept, **model.packed}, file, metadata={"format": "pt"})
    quantized = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(quantized, indent=2) + "\n")


def _write_old_ropes(folder: Path, model: PreTrainedModel) -> None:
    """Writes the ropes of Gemma 3 as published files have them."""
    path = folder / "config.json"
    written = json.loads(path.read_text("utf-8"))
    ropes = written.pop("rope_parameters")
    written["rope_theta"] = ropes["full_attention"]["rope_theta"]
    written["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    written["rope_scaling"] = CASES["gemma3-typed-rope"].config["rope_scaling"]
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", "utf-8")
    again = type(model.config).from_pretrained(folder)
    assert again.rope_parameters == model.config.rope_parameters


FINISH = {"gpt-oss-mxfp4": _write_packed, "gemma3-typed-rope": _write_old_ropes}
