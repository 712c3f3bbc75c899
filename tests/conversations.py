"""Conversations whose turns begin with the previous turns, for tests of cached prefixes."""

from jaxspec import SamplingParams

NEW_TOKENS = 9


def params(i):
    """Sampling parameters of request i: every other request is sampled."""
    return SamplingParams(max_new_tokens=NEW_TOKENS, temperature=i % 2, seed=i, ignore_eos=True)


def conversation(engine, prompts, turns=2):
    """Runs turns of four requests with a common prefix of 20 tokens; each turn includes the previous ones.

    Returns (i, answer) of every request; its parameters are `params(i)`.
    """
    texts, answers = [prompts[2][:20] + prompt[:9] for prompt in prompts[:4]], []
    for turn in range(turns):
        requests = [engine.make_request(text, params(i)) for i, text in enumerate(texts)]
        generations = dict(engine.run(requests))
        answers += sorted(generations.items())
        texts = [[*text, *generations[i].token_ids, turn, 7] for i, text in enumerate(texts)]
    return answers


def assert_as_alone(engine, answers):
    for i, answer in answers:
        engine.forget_prefixes()
        alone = engine.generate(answer.prompt_token_ids, params(i))
        assert alone.cached_tokens == 0
        assert alone.token_ids == answer.token_ids
        assert alone.stats.accepted_at == answer.stats.accepted_at
