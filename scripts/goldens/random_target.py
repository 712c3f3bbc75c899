"""Writing the golden of a transformers model with random weights: its checkpoint and outputs."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from goldens.llama_targets import BATCH, LENGTH, random_weight, run

NUM_GREEDY = 64
MARGIN = 2e-4
"""By how much the best logit must be ahead at every greedy step, in parts of the largest."""


def write_target(
    folder: Path, model: PreTrainedModel, *, seed: int, prepare=None, greedy: tuple[int, ...] = ()
) -> None:
    """Fills `model` with random weights and writes `folder/checkpoint` and `folder/outputs.safetensors`.

    Args:
      prepare: called with the model after its weights are drawn, to change some of them.
      greedy: lengths of the beginnings of the prompts that are answered greedily, too.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    if prepare is not None:
        prepare(model, generator)
    model.eval()
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(3, vocab_size, (BATCH, LENGTH), generator=generator)
    outputs = run(model, input_ids)
    model.save_pretrained(folder / "checkpoint")
    tensors = {"input_ids": input_ids, **outputs}
    if greedy:
        answers = [greedy_tokens(model, input_ids[:, :length]) for length in greedy]
        tensors |= {"greedy_lengths": torch.tensor(greedy), "greedy": torch.stack(answers, dim=1)}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "outputs.safetensors")


def greedy_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Greedy continuations [B, 64] of `input_ids` [B, S], each token from a pass over the whole text.

    Raises:
      ValueError: at some step two tokens are so close that rounding could decide: take another seed.
    """
    for _ in range(NUM_GREEDY):
        with torch.no_grad():
            logits = model(input_ids, use_cache=False).logits[:, -1]
        best = logits.topk(2).values
        margin = ((best[:, 0] - best[:, 1]) / logits.abs().amax(dim=-1)).min().item()
        if margin < MARGIN:
            raise ValueError(f"two tokens are {margin:.1e} apart after {input_ids.shape[1]} tokens")
        input_ids = torch.cat([input_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return input_ids[:, -NUM_GREEDY:]
