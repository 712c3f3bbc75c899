"""Writing the golden of a transformers model with random weights: its checkpoint and outputs."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from goldens.llama_targets import BATCH, LENGTH, random_weight, run


def write_target(folder: Path, model: PreTrainedModel, *, seed: int, prepare=None) -> None:
    """Fills `model` with random weights and writes `folder/checkpoint` and `folder/outputs.safetensors`.

    Args:
      prepare: called with the model after its weights are drawn, to change some of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    if prepare is not None:
        prepare(model, generator)
    model.eval()
    input_ids = torch.randint(3, model.config.vocab_size, (BATCH, LENGTH), generator=generator)
    outputs = run(model, input_ids)
    model.save_pretrained(folder / "checkpoint")
    tensors = {"input_ids": input_ids, **outputs}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "outputs.safetensors")
