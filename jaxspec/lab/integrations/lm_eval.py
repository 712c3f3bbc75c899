"""A model of EleutherAI's lm-evaluation-harness: an engine scores and answers its tasks.

    lm_eval.simple_evaluate(JaxspecLM("smollm2-135m"), tasks=["arc_easy"])

    python -m jaxspec.lab.integrations.lm_eval run --model jaxspec --model_args pretrained=smollm2-135m …

The extra `lm-eval` installs lm_eval, from 0.4.13 on, without PyTorch.
"""

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import trange

from jaxspec.engine import Engine
from jaxspec.engine.api.calls import check_answers
from jaxspec.engine.api.load import load
from jaxspec.errors import OneLineError
from jaxspec.installation import optional
from jaxspec.sampling import SamplingParams

harness: Any = optional("lm_eval.api.model", extra="lm-eval")
registry: Any = optional("lm_eval.api.registry", extra="lm-eval")
models: Any = optional("lm_eval.models.utils", extra="lm-eval")
utils: Any = optional("lm_eval.utils", extra="lm-eval")

__all__ = ["JaxspecLM"]

_AT_ONCE = 256
"""Requests of one call of the engine: many, to keep its slots busy; few enough to hold their scores."""


@registry.register_model("jaxspec")
class JaxspecLM(harness.TemplateLM):
    """Log-likelihoods and answers of an engine, equal to those of the harness's own `hf`.

    Attributes:
      engine: the engine.
      max_length: the most tokens that a token is predicted from; of longer texts the beginning is cut off.
      max_gen_toks: the most tokens of an answer, where a task says nothing.
      prefix_token_id: what the first token of a text is predicted from.
    """

    max_gen_toks = 256
    eot_token_id = prefix_token_id = None

    def __init__(
        self,
        pretrained: str | Path | Engine,
        *,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ):
        """Loads a model.

        Args:
          pretrained: an engine, or a model as of `jaxspec.load`.
          batch_size: that of the engine; "auto" and None leave it to the configuration.
          max_length: None takes as much as the engine has room for, its `max_model_len` less one.
          chat_template_args: arguments of the chat template, for example {"enable_thinking": False}.
          **options: arguments of `jaxspec.load`, for example `drafter`, `device` and `dtype`.

        Raises:
          ValueError: as `jaxspec.load`, or an engine comes with arguments of it, or there is no tokenizer, or
            it names neither a first token of a text nor a last one.
        """
        super().__init__()
        if batch_size is not None and not str(batch_size).startswith("auto"):
            options["batch_size"] = int(batch_size)
        if options.get("device") == "cuda:0":  # what the harness's command says where nobody does
            del options["device"]
        if isinstance(pretrained, Engine) and options:
            raise OneLineError(f"{next(iter(options))}: the model is an engine, which is loaded already")
        if max_length is not None:
            options.setdefault("max_model_len", max_length + 1)
        self.engine = pretrained if isinstance(pretrained, Engine) else load(pretrained, **options)
        tokenizer: Any = self.engine.tokenizer
        if tokenizer is None:
            raise OneLineError("the tasks of lm_eval are texts, and the checkpoint has no tokenizer")
        self.tokenizer, self.chat_template_args = tokenizer, chat_template_args or {}
        self.max_length = max_length or self.engine.room(1)
        first = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
        self.eot_token_id = next(iter([*tokenizer.eos_token_ids, *self.engine.eos_token_ids]), None)
        self.prefix_token_id = self.eot_token_id if first is None else first
        if self.prefix_token_id is None:
            raise OneLineError("the tokenizer names neither a first token of a text nor a last one")

    @property
    def tokenizer_name(self) -> str:
        """A name by which the harness keeps rendered prompts."""
        return utils.hash_string(f"{self.tokenizer.chat_template} {self.chat_template_args}")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, arguments=self.chat_template_args, continue_final_message=not add_generation_prompt
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        sizes, of_texts = (self.prefix_token_id, self.max_length, 1), []
        for request in requests:
            windows = utils.get_rolling_token_windows(self.tok_encode(request.args[0]), *sizes)
            of_texts.append([(None, *utils.make_disjoint_window(window)) for window in windows])
        values = iter(self._loglikelihood_tokens(list(chain(*of_texts)), disable_tqdm))
        return [sum(next(values)[0] for _ in windows) for windows in of_texts]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for start in trange(0, len(requests), _AT_ONCE, disable=disable_tqdm):
            part = requests[start : start + _AT_ONCE]
            if (longest := max(len(scored) for *_, scored in part)) > self.max_length:
                raise OneLineError(f"a continuation has {longest} tokens: max_length is {self.max_length}")
            texts = [(context + scored)[-self.max_length - 1 :] for _, context, scored in part]
            scores = self.engine.score(texts, top=1)
            are_likeliest = scores.top_tokens[..., 0] == scores.tokens
            for i, (strings, _, scored) in enumerate(part):
                place = i, slice(len(texts[i]) - len(scored), len(texts[i]))
                logprob = float(scores.logprobs[place].sum(dtype=np.float64))
                results.append((logprob, bool(are_likeliest[place].all())))
                if strings is not None:
                    self.cache_hook.add_partial("loglikelihood", strings, results[-1])
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers. Where a task samples, seeds are drawn from Python's `random`, which the harness seeds."""
        texts: list[str] = []
        for start in trange(0, len(requests), _AT_ONCE, disable=disable_tqdm):
            part = requests[start : start + _AT_ONCE]
            asked = [self._ask(*request.args) for request in part]
            answers = self.engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            check_answers("answer", answers)
            for request, answer in zip(part, answers, strict=True):
                texts.append(answer.text)
                self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return texts

    def _ask(self, context: str, arguments: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        fields = dict(models.normalize_gen_kwargs(arguments, self.max_gen_toks))
        size, until, _ = (fields.pop(name) for name in ("max_gen_toks", "until", "do_sample"))
        if not 0 < size < self.max_length:
            raise OneLineError(f"max_gen_toks must be 1 to {self.max_length - 1}, got {size}")
        if fields.get("temperature"):
            fields.setdefault("seed", random.getrandbits(64))
        fields |= {"max_new_tokens": size, "stop": [text for text in until if text]}
        return self.tok_encode(context)[size - self.max_length :], SamplingParams.merge(None, fields)


if __name__ == "__main__":
    optional("lm_eval.__main__", extra="lm-eval").cli_evaluate()
