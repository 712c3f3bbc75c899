"""The weights of Tunix's models by the names of Hugging Face's; needs no Tunix."""

from jaxspec.weights.memory import Axes

_RENAMED: dict[str, tuple[str, Axes]] = {
    "embedder.input_embedding": ("model.embed_tokens.weight", (0, 1)),
    "final_norm.w": ("model.norm.weight", (0,)),
    "lm_head.w": ("lm_head.weight", (1, 0)),
}
_PROJECTIONS: dict[str, Axes] = {
    "q_proj": ((1, 2), 0),
    "k_proj": ((1, 2), 0),
    "v_proj": ((1, 2), 0),
    "o_proj": (2, (0, 1)),
}


def tunix_names(path: str) -> tuple[str, Axes]:
    """The name of a weight of Tunix's Llama 3, Qwen2 or dense Qwen3, and the order of its axes: the `names`
    of `jaxspec.load` and `Engine.update_weights`.

    Args:
      path: its path in the model, as "layers.0.attn.q_proj.w" (a projection [M, N, D] with an axis of heads).
    """
    if path in _RENAMED:
        return _RENAMED[path]
    module, _, leaf = path.replace(".attn.", ".self_attn.").rpartition(".")
    if leaf.endswith("_bias"):  # "layers.0.attn.q_bias"
        return f"model.{module}.{leaf.removesuffix('_bias')}_proj.bias", (0,)
    name = module.rpartition(".")[2]
    axes = (0,) if name.endswith("norm") else _PROJECTIONS.get(name, (1, 0))
    return f"model.{module}.weight", axes
