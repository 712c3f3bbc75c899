"""Tunix's trainer samples from an engine: with the real package, where it is installed."""

import importlib
import sys
import warnings
from functools import partial
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import jaxspec
from jaxspec.config import ModelConfig
from jaxspec.drafters import Eagle1, Eagle1Config
from jaxspec.installation import install_command
from jaxspec.lab.integrations.tunix_names import tunix_names

VOCABULARY, PAD, BOS, EOS = 32, 0, 1, 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
UPDATES, GENERATIONS, PROMPTS, LENGTH = 24, 8, 4, 12


class Words:
    """A tokenizer: a number's token."""

    def encode(self, text, **_):
        return [3 + int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(i - 3) for i in ids)

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


@pytest.fixture(scope="module")
def tunix():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix", reason="needs the extra tunix, google-tunix")
        from tunix.models.llama3.model import Llama3
        from tunix.models.llama3.model import ModelConfig as Config
        from tunix.rl import common, rl_cluster
        from tunix.rl.grpo import grpo_learner
        from tunix.rl.rollout.base_rollout import RolloutConfig

        from jaxspec.lab.integrations.tunix import JaxspecRollout
    shape = {"num_layers": 2, "vocab_size": VOCABULARY, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "rope_theta": 10000, "norm_eps": 1e-5}
    return SimpleNamespace(
        make=lambda: Llama3(Config(**shape, **heads), rngs=nnx.Rngs(0)),
        logprobs=common.compute_per_token_logps,
        cluster=rl_cluster,
        grpo=grpo_learner,
        sampling=partial(RolloutConfig, max_prompt_length=8, kv_cache_size=32, max_tokens_to_generate=LENGTH),
        rollout=JaxspecRollout,
    )


@pytest.fixture(scope="module")
def engine(tunix):
    head = Eagle1(
        Eagle1Config(ModelConfig.from_hf({**CONFIG, "num_hidden_layers": 1})),
        num_speculative_tokens=2,
        dtype=jax.numpy.dtype("float32"),
        rngs=nnx.Rngs(1),
    )
    sizes = {"batch_size": 8, "max_model_len": 40, "page_size": 8, "prefill_chunk": 8, "slot_sizes": ()}
    weights = nnx.state(tunix.make())
    with jaxspec.load(
        CONFIG, weights=weights, names=tunix_names, drafter=head, progress=False, **sizes
    ) as engine:
        yield engine


def train(tunix, rollout, seed=None):
    """The mean reward of each update of GRPO, and the cluster; small numbers are worth something."""
    rewards = []

    def reward(prompts, completions, **_):
        texts = [text.split() for text in completions]
        small = [sum(int(word) < 8 for word in text) / max(len(text), 1) for text in texts]
        rewards.append(np.mean(small))
        return small

    roles, mesh = tunix.cluster.Role, Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = tunix.cluster.RLCluster(
        actor=tunix.make(),
        tokenizer=Words(),
        cluster_config=tunix.cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            rollout_engine=rollout,
            training_config=tunix.cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(5e-3),
                eval_every_n_steps=1000,
                max_steps=UPDATES,
                mini_batch_size=PROMPTS,
                train_micro_batch_size=PROMPTS,
            ),
            rollout_config=tunix.sampling(temperature=1.0, top_p=1.0, seed=seed),
        ),
    )
    algorithm = tunix.grpo.GRPOConfig(num_generations=GENERATIONS, beta=0.0)
    learner = tunix.grpo.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)
    rng = np.random.default_rng(0)
    texts = [[" ".join(map(str, rng.integers(0, 29, 4))) for _ in range(PROMPTS)] for _ in range(UPDATES)]
    learner.train([{"prompts": np.array(each)} for each in texts])
    return rewards, cluster


@pytest.mark.filterwarnings("ignore")
def test_rewards_rise_as_with_tunixs_own_rollouts(tunix, engine):
    rollout = partial(tunix.rollout, engine=engine, adapt={"batch_tokens": 256})
    ours, cluster = train(tunix, rollout, seed=jax.random.key(3))
    own, _ = train(tunix, "vanilla")
    for rewards in (ours, own):
        assert len(rewards) == UPDATES
        assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.2
    assert abs(np.mean(ours[-4:]) - np.mean(own[-4:])) < 0.15
    # An update of the policy, at the start and after each step, and one of the head after each step.
    assert engine.weights_version == 1 + 2 * UPDATES
    rollout, model = cluster.rollout, cluster.actor_trainer.model
    assert jaxspec.AcceptanceStats.total(rollout.answers).accepted > 0
    prompts = np.array([[PAD, BOS, 5, 6], [BOS, 9, 4, 3]])
    completions = np.array([[8, 9, EOS], [7, PAD, PAD]])
    expected = tunix.logprobs(*nnx.split(model), prompts, completions, PAD, EOS)
    found = rollout.get_per_token_logps(prompts, completions)
    np.testing.assert_allclose(found[completions != PAD], expected[completions != PAD], atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_an_answer_is_what_tunix_expects(tunix, engine):
    model = tunix.make()
    rollout = tunix.rollout(engine, rollout_actor=model, tokenizer=adapter(Words()))
    config = tunix.sampling(temperature=0.7, top_k=5, seed=3, return_logprobs=True)
    first, second = (rollout.generate(["4 5", "6"], config) for _ in range(2))
    assert np.array_equal(first.left_padded_prompt_tokens, [[PAD] * 5 + [BOS, 7, 8], [PAD] * 6 + [BOS, 9]])
    assert [tokens.tolist() for tokens in first.tokens] != [tokens.tolist() for tokens in second.tokens]
    for text, tokens, logprobs in zip(first.text, first.tokens, first.logprobs, strict=True):
        assert text == Words().decode(tokens)
        assert len(tokens) == len(logprobs) <= LENGTH
        assert EOS not in tokens[:-1]
    (again,) = (
        tunix.rollout(engine, rollout_actor=model, tokenizer=adapter(Words()))
        .generate(["4 5"], config)
        .tokens
    )
    assert again.tolist() == first.tokens[0].tolist()
    # Of the distribution that was sampled from, of five tokens.
    raw = rollout.get_per_token_logps(first.left_padded_prompt_tokens[:1], first.tokens[0][None])[0]
    assert (first.logprobs[0] > raw).all()
    with pytest.raises(ValueError, match=r"generate: images is not supported"):
        rollout.generate(["4"], config, images=None)
    with pytest.raises(ValueError, match=r"weights of LoRA are not supported"):
        rollout.update_params({}, (nnx.LoRAParam,))


def adapter(tokenizer):
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    return TokenizerAdapter(tokenizer)


class Scores:
    """An engine whose log-probability of each token of a text is minus its place."""

    def __init__(self, ends):
        self.eos_token_ids, self.texts = ends, []
        self.core = SimpleNamespace(device=jax.devices()[0])

    def update_weights(self, weights, names):
        pass

    def score(self, texts):
        self.texts = texts
        return SimpleNamespace(logprobs=-np.tile(np.arange(12.0), (len(texts), 1)))


@pytest.mark.parametrize(
    ("pad", "ends", "completion", "scored"),
    [
        (0, (), [5, 6, 2, 0, 0], 3),
        (0, (), [5, 0, 6, 2, 0], 4),  # a token of the answer, though it is the one that pads
        (0, (), [5, 6, 7, 8, 9], 5),
        (2, (), [5, 6, 2, 2, 2], 3),  # the first of them is the end
        (2, (), [5, 6, 7, 8, 2], 5),
        (2, (), [2, 2, 2, 2, 2], 1),
        (2, (9,), [5, 6, 9, 2, 2], 3),  # has ended with another token
        (9, (9,), [5, 6, 9, 9, 9], 3),
        (9, (9,), [5, 6, 2, 9, 9], 3),
    ],
)
def test_an_end_that_also_pads_is_scored(monkeypatch, pad, ends, completion, scored):
    stub = ModuleType("tunix.rl.rollout.base_rollout")
    stub.BaseRollout = object
    for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, "jaxspec.lab.integrations.tunix", raising=False)
    module = importlib.import_module("jaxspec.lab.integrations.tunix")
    monkeypatch.delitem(sys.modules, "jaxspec.lab.integrations.tunix")
    words, engine = Words(), Scores(ends)
    monkeypatch.setattr(words, "pad_id", lambda: pad, raising=False)
    rollout = module.JaxspecRollout(engine, rollout_actor=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tokenizer=words)
    logprobs = rollout.get_per_token_logps(np.array([[pad, pad, 1, 4, 4]]), np.array([completion]))
    assert engine.texts == [[1, 4, 4, *completion[:scored]]]
    assert logprobs[0].tolist() == [-3.0 - i if i < scored else 0.0 for i in range(5)]


def test_a_missing_package_is_one_line(monkeypatch):
    for name in ["tunix", *(name for name in sys.modules if name.startswith("tunix."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jaxspec.lab.integrations.tunix", raising=False)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("jaxspec.lab.integrations.tunix")
    assert str(error.value) == f"this needs tunix, which is not installed: {install_command('tunix')}"


def test_names_of_biases_and_of_norms_of_heads():
    """Those of Qwen2 and Qwen3; test_weights.py has a whole Llama."""
    assert tunix_names("layers.3.attn.k_bias") == ("model.layers.3.self_attn.k_proj.bias", (0,))
    assert tunix_names("layers.3.attn.q_norm.w") == ("model.layers.3.self_attn.q_norm.weight", (0,))
