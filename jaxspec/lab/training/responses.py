"""Collecting answers: the target's own, and those that prompts came with."""

from collections.abc import Callable

from jaxspec.engine import Engine
from jaxspec.lab.training.answers import generate_answers
from jaxspec.lab.training.config import ResponsesConfig
from jaxspec.lab.training.stage_folder import StageFolder
from jaxspec.lab.training.token_rows import TokenRows, next_shard, read_shards
from jaxspec.sampling import SamplingParams


def make_responses(
    config: ResponsesConfig,
    prompts: TokenRows,
    given: TokenRows,
    folder: StageFolder,
    make_engine: Callable[[], Engine],
) -> None:
    """The stage "responses": one answer per prompt, in shards, and one more at every extra temperature.

    Answer i belongs to prompt i modulo the number of prompts. A prompt that came with an answer keeps it.

    Args:
      config: the responses' section of the configuration.
      prompts: all prompts.
      given: answers that prompts came with, by index of the prompt.
      folder: the stage's folder.
      make_engine: called only if there are prompts to answer.
    """

    def temperature(index: int) -> float:
        extra, prompt = divmod(index, len(prompts))
        if extra:
            return float(config.extra_temperatures[extra - 1])
        return float(config.temperatures[prompt % len(config.temperatures)])

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature(index),
            max_new_tokens=config.max_new_tokens,
            seed=(config.seed << 32) + index,
        )

    answered = set(given.index.tolist())
    if answered - set(read_shards(folder.path).index.tolist()):
        given.save(next_shard(folder.path))
    encoded = [tokens.tolist() for tokens in prompts.sequences()] * (1 + len(config.extra_temperatures))
    wanted = [i for i in range(len(encoded)) if i % len(prompts) not in answered]
    if wanted:
        generate_answers(make_engine(), encoded, params, folder.path, label="answers", wanted=wanted)
    answers = read_shards(folder.path)
    folder.finish(
        answers=len(answers),
        tokens=int(answers.length.sum()),
        mean_length=float(answers.length.mean()),
        stopped=float(answers.stopped.mean()),
    )
