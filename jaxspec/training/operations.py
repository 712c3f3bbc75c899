"""How much arithmetic an update takes: what a throughput is a share of."""

from jaxspec.config import ModelConfig
from jaxspec.drafters.eagle3 import Eagle3Config


def operations_per_token(
    target: ModelConfig, head: Eagle3Config, *, row_length: int, num_unroll_steps: int
) -> float:
    """Floating-point operations of matrix products per token of a packed row.

    Counts the target's forward pass and output projections, and the head forward and backward in every
    draft step; neither what is recomputed on the way back, nor norms and softmax. Attention is counted
    over the whole row, as it is computed.
    """
    forward = target.num_hidden_layers * _layer(
        target, target.hidden_size, row_length
    ) + 2 * target.hidden_size * (target.vocab_size + head.draft_vocab_size)
    layers = head.layers
    width = layers.hidden_size
    first = _layer(layers, 2 * width, row_length)
    rest = (layers.num_hidden_layers - 1) * _layer(layers, width, row_length)
    # The output rows are frozen: of their two backward products only the one for the input is left.
    step = 3 * (first + rest) + 2 * (2 * width * head.draft_vocab_size)
    fuse = 2 * (2 * len(head.capture) * head.target_hidden_size * width)
    return float(forward + fuse + num_unroll_steps * step)


def _layer(config: ModelConfig, in_width: int, row_length: int) -> int:
    """Of one decoder layer's forward pass, attention reading `in_width`."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    weights = in_width * (heads + 2 * kv_heads) * size + heads * size * config.hidden_size
    weights += 3 * config.hidden_size * config.intermediate_size
    return 2 * weights + 4 * row_length * heads * size
