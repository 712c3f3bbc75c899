"""Generating many answers with the engine, saved in shards that survive an interruption."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm.auto import tqdm

from jaxspec.engine import Engine, Generation
from jaxspec.lab.training.token_rows import TokenRows, next_shard, read_shards
from jaxspec.sampling import SamplingParams

SHARD_ROWS = 1024


def generate_answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Callable[[int], SamplingParams],
    folder: Path,
    *,
    label: str,
    wanted: Sequence[int] | None = None,
) -> TokenRows:
    """Answers every prompt that has no answer in `folder` yet, and returns all answers.

    Every prompt has its own seed, so its answer does not depend on the others. An interruption keeps the
    answers finished so far.

    Args:
      engine: answers the prompts.
      prompts: token ids of every prompt.
      params: returns the sampling parameters of the prompt with a given index. If the engine has no
        room for max_new_tokens of them, the answer is as long as fits.
      folder: folder of the shards.
      label: of the progress bar.
      wanted: indices of the prompts to answer; None answers all.
    """
    folder.mkdir(exist_ok=True)
    done = set(read_shards(folder).index.tolist())
    wanted = range(len(prompts)) if wanted is None else wanted
    todo = [i for i in wanted if i not in done]
    finished: list[tuple[int, Generation]] = []
    tokens, begin = 0, time.monotonic()
    requests = (engine.make_request(prompts[i], fitting(engine, prompts[i], params(i))) for i in todo)
    with tqdm(
        total=len(wanted), initial=len(wanted) - len(todo), desc=label, unit="answer", mininterval=2
    ) as bar:
        try:
            for at, generation in engine.run(requests):
                finished.append((todo[at], generation))
                tokens += len(generation.token_ids)
                bar.set_postfix_str(f"{tokens / (time.monotonic() - begin):.0f} tokens/s", refresh=False)
                bar.update()
                if len(finished) == SHARD_ROWS:
                    _save(finished, folder)
        finally:
            _save(finished, folder)
    return read_shards(folder)


def fitting(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
    """The parameters with a `max_new_tokens` for which the engine has room after a prompt."""
    assert params.max_new_tokens is not None
    room = engine.max_model_len - len(prompt)
    return replace(params, max_new_tokens=max(min(params.max_new_tokens, room), 1))


def _save(finished: list[tuple[int, Generation]], folder: Path) -> None:
    if not finished:
        return
    rows = [(index, answer.token_ids, answer.finish_reason == "stop") for index, answer in finished]
    TokenRows.of(rows).save(next_shard(folder))
    finished.clear()
