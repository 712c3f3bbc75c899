"""Published shapes, from prompt to emitted tokens, without an array: `jax.eval_shape` all the way."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from full_size_run import assert_runs

from jaxspec.config import ModelConfig
from jaxspec.drafters.kinds.mtp import Mtp
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.models.target import make_target
from jaxspec.weights.loading import declared

FOLDER = Path(__file__).parent / "full_size"
PARAMETERS = {
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.19e9,
    "qwen3-32b": 32.76e9,
    "qwen3-30b-a3b": 30.53e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "gemma-3-1b": 1.0e9,
    "gemma-3-4b": 3.88e9,
    "gemma-3-27b": 27.01e9,
    "glm-4-9b-0414": 9.4e9,
    "glm-4-32b-0414": 32.57e9,
    "glm-4.7-flash": 29.94e9,
    "deepseek-v3": 671.03e9,
    "deepseek-v4-flash": 284.33e9,
}
"""What the model cards say, without what sees images; a tied output head counts once."""
SLOW = (
    *("qwen3-0.6b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b", "gemma-3-4b", "gemma-3-27b"),
    *("glm-4-32b-0414", "deepseek-v3", "deepseek-v4-flash"),
)
LAYERS = 8
"""That run: more than the longest period, Gemma 3's of six, and the dense layers before experts."""


def test_every_configuration_is_tested():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PARAMETERS]
)
def test_full_size_shapes_run_through_prefill_and_decode(name):
    """All layers are counted; as they repeat those before them, the first ones run."""
    stored = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    whole = target_of(ModelConfig.from_hf(stored))
    count = sum(variable.get_value().size for variable, _ in declared(whole))
    assert count == pytest.approx(PARAMETERS[name], rel=2e-3)

    text = stored.get("text_config", stored)
    lists = {key: value[:LAYERS] for key, value in text.items() if key in ("layer_types", "compress_ratios")}
    text |= {"num_hidden_layers": LAYERS, **lists}
    config = ModelConfig.from_hf(stored)
    target = target_of(config)
    assert len(target.kinds) == LAYERS
    assert set(target.kinds) == set(whole.kinds)
    assert_runs(target, drafter_of(config))


def target_of(config):
    return nnx.eval_shape(lambda: make_target(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def drafter_of(config):
    """A model's own prediction layer where it has one."""
    if not config.num_nextn_predict_layers:
        return NGramDrafter(3)
    made = Mtp.for_model(config)
    return nnx.eval_shape(
        lambda: made(config, num_speculative_tokens=3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
