"""The Llama family against transformers, in one pass and in pieces through the paged cache."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import TARGETS, assert_close, golden_checkpoint, golden_outputs
from paged_rows import PagedTarget
from tiny_models import write_target

from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target, target_config


def load(case):
    return load_target(golden_checkpoint(case), dtype=jnp.float32)


@pytest.mark.parametrize("case", TARGETS)
def test_logits_and_hidden_states_equal_transformers(case):
    model, golden = load(case), golden_outputs(case)
    ids = golden["input_ids"].astype(np.int32)
    depth = model.config.num_hidden_layers
    paged = PagedTarget(model, *ids.shape, page_size=16, width=48, capture=tuple(range(depth + 1)))
    logits, hidden, captured = paged.feed(ids, [0, 0])
    assert_close(logits, golden["logits"])
    assert_close(hidden, golden["normed"])
    for state, expected in zip(captured, golden["hidden"], strict=True):
        assert_close(state, expected)


@pytest.mark.parametrize(
    ("page_size", "width", "pieces"),
    [
        pytest.param(8, 1, [[1] * 48, [1] * 48], id="one token at a time"),
        pytest.param(4, 5, [[5] * 9 + [3], [5] * 9 + [3]], id="K+1 at a time"),
        pytest.param(1, 41, [[7, 1, 40], [41, 7]], id="pages of one position"),
        pytest.param(64, 30, [[20, 1, 1, 26], [3, 30, 15]], id="one page"),
        pytest.param(32, 30, [[30, 2, 1, 15], [20, 13, 15]], id="across a page's edge"),
    ],
)
def test_pieces_through_the_cache_equal_one_pass(page_size, width, pieces):
    """Two slots, each in pieces of its own; what the cache held before is poison."""
    golden = golden_outputs("llama-untied-llama3-rope")
    ids = golden["input_ids"].astype(np.int32)
    paged = PagedTarget(
        load("llama-untied-llama3-rope"), 2, 48, page_size=page_size, width=width, fill=np.nan
    )
    starts = [0, 0]
    for step in range(max(map(len, pieces))):
        counts = [row[step] if step < len(row) else 0 for row in pieces]
        rows = [ids[slot, at : at + n] for slot, (at, n) in enumerate(zip(starts, counts, strict=True))]
        logits, _, _ = paged.feed(rows, starts)
        for slot, n in enumerate(counts):
            if n:
                assert_close(logits[slot, :n], golden["logits"][slot, starts[slot] : starts[slot] + n])
            starts[slot] += n
    assert starts == [48, 48]


def dense_attention_layer(config, tensors, name, x, window):
    """One attention block over x f64[S, M] at positions 0 … S-1, every position recomputed."""
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    q, k, v = (
        (x @ tensors[f"{name}.self_attn.{part}_proj.weight"].astype(np.float64).T).reshape(len(x), -1, size)
        for part in "qkv"
    )
    frequencies = config.rope.theta ** (-np.arange(0, size, 2) / size)
    angles = np.arange(len(x))[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)

    def rotate(rows):
        left, right = np.split(rows, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    q, k = rotate(q), np.repeat(rotate(k), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * size**-0.5
    distance = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
    scores[:, (distance < 0) | (distance >= window)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, axis=1)).reshape(len(x), -1)
    return attended @ tensors[f"{name}.self_attn.o_proj.weight"].astype(np.float64).T


def test_sliding_window_layers_equal_a_dense_reference(tmp_path):
    """Windows of 5 under pages of 4: every layer sees its last five positions, or all of them."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = write_target(
        tmp_path / "target", gain=1.5, num_hidden_layers=3, layer_types=kinds, sliding_window=5
    )
    checkpoint = open_checkpoint(folder)
    model, config = load_target(checkpoint, dtype=jnp.float32), target_config(checkpoint)
    tensors = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}

    def norm(x, name):
        scale = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x * scale * tensors[f"{name}.weight"]

    ids = np.random.default_rng(0).integers(0, 48, size=21)
    x = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    expected = [x]
    for i, kind in enumerate(kinds):
        name = f"model.layers.{i}"
        window = 5 if kind == "sliding_attention" else 99
        x = x + dense_attention_layer(config, tensors, name, norm(x, f"{name}.input_layernorm"), window)
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (y @ tensors[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{name}.mlp.down_proj.weight"].T
        expected.append(x)

    paged = PagedTarget(model, 1, 21, page_size=4, width=9, capture=(0, 1, 2, 3), fill=np.nan)
    for start, stop in ((0, 9), (9, 10), (10, 15), (15, 21)):
        _, _, captured = paged.feed([ids[start:stop]], [start])
        for state, whole in zip(captured, expected, strict=True):
            assert_close(state[0, : stop - start], whole[start:stop].astype(np.float32))
