"""Load a model, answer, stream and count: jaxspec on one screen.

python scripts/example.py [MODEL]
"""

import sys

import jaxspec


def run(model: str = "smollm2-135m") -> None:
    with jaxspec.load(model) as engine:
        # Several prompts share a batch. A string is a user's turn; chat messages and token ids do as well.
        prompts = ["Why is the sky blue?", "Name three rivers."]
        for answer in engine.generate(prompts, max_new_tokens=48):
            print(answer.text)
            print(f"    {answer.stats}, ended by {answer.finish_reason}")

        for piece in engine.stream("Tell me a story.", max_new_tokens=48, temperature=0.8, seed=1):
            print(piece.text, end="", flush=True)
        print()

        # The same text, whatever the drafter: with and without drafts.
        drafted = engine.generate(prompts[0], max_new_tokens=48)
        plain = engine.generate(prompts[0], max_new_tokens=48, num_speculative_tokens=0)
        print("same without drafts:", drafted.token_ids == plain.token_ids)

        print(engine.counters)


if __name__ == "__main__":
    run(*sys.argv[1:])
