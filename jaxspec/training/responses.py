"""The target's own answers to the prompts."""

from jaxspec.engine import Engine
from jaxspec.sampling import SamplingParams
from jaxspec.training.answers import generate_answers
from jaxspec.training.config import ResponsesConfig
from jaxspec.training.stage_folder import StageFolder
from jaxspec.training.token_rows import TokenRows


def make_responses(config: ResponsesConfig, prompts: TokenRows, folder: StageFolder, engine: Engine) -> None:
    """The stage "responses": one answer per prompt, in shards, and one more at every extra temperature.

    Answer i belongs to prompt i modulo the number of prompts.
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

    encoded = [tokens.tolist() for tokens in prompts.sequences()] * (1 + len(config.extra_temperatures))
    answers = generate_answers(engine, encoded, params, folder.path, label="answers")
    folder.finish(
        answers=len(answers),
        tokens=int(answers.length.sum()),
        mean_length=float(answers.length.mean()),
        stopped=float(answers.stopped.mean()),
    )
