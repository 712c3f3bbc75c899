"""The target's own answers to the prompts."""

from jaxspec.engine import Engine
from jaxspec.sampling import SamplingParams
from jaxspec.training.answers import generate_answers
from jaxspec.training.config import ResponsesConfig
from jaxspec.training.stage_folder import StageFolder
from jaxspec.training.token_rows import TokenRows


def make_responses(config: ResponsesConfig, prompts: TokenRows, folder: StageFolder, engine: Engine) -> None:
    """The stage "responses": one answer per prompt, in shards."""

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=float(config.temperatures[index % len(config.temperatures)]),
            max_new_tokens=config.max_new_tokens,
            seed=(config.seed << 32) + index,
        )

    encoded = [tokens.tolist() for tokens in prompts.sequences()]
    answers = generate_answers(engine, encoded, params, folder.path, label="answers")
    folder.finish(
        answers=len(answers),
        tokens=int(answers.length.sum()),
        mean_length=float(answers.length.mean()),
        stopped=float(answers.stopped.mean()),
    )
