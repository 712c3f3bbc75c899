"""Rollouts with drafts for Tunix: its trainers sample from an engine of this package.

    engine = jaxspec.load(config, weights=nnx.state(model), names=tunix_names, drafter=…)
    ClusterConfig(rollout_engine=partial(JaxspecRollout, engine=engine), …)

The extra `tunix` installs google-tunix, from 0.1.7 on.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec.engine import Engine, Generation
from jaxspec.installation import optional
from jaxspec.lab.integrations.tunix_names import tunix_names
from jaxspec.sampling import SamplingParams, sample_seed
from jaxspec.sharding import leaving
from jaxspec.weights.memory import Names

base_rollout: Any = optional("tunix.rl.rollout.base_rollout", extra="tunix")

__all__ = ["JaxspecRollout", "tunix_names"]


class JaxspecRollout(base_rollout.BaseRollout):
    """A rollout worker whose answers come from an engine, which gets the policy's weights as they change.

    Of `RolloutConfig` it honours what says how to sample and how long; sizes of caches, parallelism and the
    settings of other workers have no meaning here, since the engine has its own.

    Attributes:
      engine: the engine.
      answers: the last ones that it gave, for `jaxspec.lab.training.adapt`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        names: Names | None = tunix_names,
        adapt: dict[str, Any] | None = None,
        mesh: Any = None,
        rollout_config: Any = None,
    ):
        """Puts the policy's weights into the engine.

        Args:
          engine: an engine for a model of the policy's shape, with weights that are not packed.
          rollout_actor, tokenizer: the policy and Tunix's adapter of its tokenizer; Tunix gives these.
          names: translates the names of the policy's weights; see `jaxspec.load`.
          adapt: arguments of `jaxspec.lab.training.adapt`, which is then called after each update of the
            policy, so that the head keeps up; None leaves the head as it is.
          mesh, rollout_config: given by Tunix; unused.

        Raises:
          CheckpointError: the policy's weights are not those of the engine's model.
        """
        self.engine = engine
        self.answers: list[Generation] = []
        self._tokenizer, self._names, self._adapt = tokenizer, names, adapt
        self._calls = 0
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Answers prompts, given as texts that need no chat template.

        Returns:
          A `RolloutOutput`. Its log-probabilities are of the distribution that was sampled from, as those of
          Tunix's other workers; it has no logits.

        Raises:
          ValueError: there are arguments that it does not know, or as `Engine.generate`.
        """
        if kwargs:
            raise ValueError(f"JaxspecRollout.generate: {next(iter(kwargs))} is not supported")
        ids = [self._encode(prompt) for prompt in prompts]
        given = rollout_config.seed
        self._calls += 1
        eos = rollout_config.eos_tokens or [self.eos_id()]
        params = SamplingParams(
            max_new_tokens=rollout_config.max_tokens_to_generate,
            temperature=rollout_config.temperature,
            top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
            top_k=rollout_config.top_k or 0,
            seed=None if given is None else sample_seed(_as_int(given), self._calls),
            stop_token_ids=tuple(map(int, eos)),
            ignore_eos=True,
            logprobs=0 if rollout_config.return_logprobs else None,
            logprobs_mode="processed_logprobs",
        )
        self.answers = self.engine.generate(ids, params)
        width = rollout_config.max_prompt_length
        longest = max(map(len, ids))
        if longest > width:  # as in Tunix's own worker
            width = 1 << (longest - 1).bit_length()
        padded = [[self.pad_id()] * (width - len(prompt)) + prompt for prompt in ids]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(answer.token_ids) for answer in self.answers],
            logits=None,
            tokens=[np.asarray(answer.token_ids, np.int32) for answer in self.answers],
            left_padded_prompt_tokens=np.asarray(padded, np.int32),
            logprobs=[np.asarray(answer.logprobs, np.float32) for answer in self.answers]
            if rollout_config.return_logprobs
            else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log-probabilities f32[B, C] of completions by the engine's present weights, at temperature 1, and 0
        for padding. Where padding is a token that ends answers, the first one behind an answer is its end.

        Args:
          prompt_tokens: i32[B, P], padded on the left.
          completion_tokens: i32[B, C], padded on the right.
        """
        ends = {self.eos_id(), *self.engine.eos_token_ids}
        pad = self.pad_id()
        prompts = [_without_padding(row[::-1].tolist(), pad)[::-1] for row in np.asarray(prompt_tokens)]
        answers = [_without_padding(row.tolist(), pad, ends) for row in np.asarray(completion_tokens)]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        scores = self.engine.score(texts)
        logprobs = np.zeros(completion_tokens.shape, np.float32)
        for i, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            logprobs[i, : len(answer)] = scores.logprobs[i, len(text) - len(answer) : len(text)]
        return leaving(logprobs, self.engine.core.device)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Puts the policy's new weights into the engine, and adapts the head if that was asked for.

        Raises:
          ValueError: they are not all of the policy's weights, but those of LoRA.
        """
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ValueError(
                "JaxspecRollout: weights of LoRA are not supported; merge them into the policy's"
            )
        self.engine.update_weights(params, names=self._names)
        if self._adapt is not None and self.answers:
            from jaxspec.lab.training import adapt

            adapt(self.engine, self.answers, **self._adapt)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the policy's arrays are not shared, so Tunix is to call `update_params`."""

    def _encode(self, prompt: str) -> list[int]:
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return [int(i) for i in self._tokenizer.dedup_bos_ids(begin + list(self._tokenizer.encode(prompt)))]


def _without_padding(tokens: list[int], pad: int, ends: Collection[int] = ()) -> list[int]:
    """A row without the padding behind it, but with its end, which may be the token that also pads."""
    length = next((i for i in range(len(tokens), 0, -1) if tokens[i - 1] != pad), 0)
    has_end = length > 0 and tokens[length - 1] in ends
    return tokens[: length + 1] if pad in ends and not has_end else tokens[:length]


def _as_int(seed: Any) -> int:
    """A seed of Tunix's, a number or a key, as a number."""
    if isinstance(seed, int):
        return seed
    words = np.asarray(jax.random.key_data(seed)).ravel()
    return int.from_bytes(words.astype(np.uint32).tobytes()[-8:], "little")
