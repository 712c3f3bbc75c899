"""An engine without a model: answers are hashes, and finish in a pseudo-random order."""

import dataclasses
import random
import time
from dataclasses import dataclass
from itertools import islice

from jaxspec.engine import AcceptanceStats, Generation
from jaxspec.sampling import SamplingParams
from jaxspec.service.rows import hash_json


@dataclass(eq=False)
class FakeRequest:
    prompt: list[int]
    params: SamplingParams
    rounds: int


class FakeEngine:
    """The parts of `Engine` that `BatchRun` uses.

    A prompt with "long" in it is rejected, and one with "fail" fails. The tokens of an answer and the number
    of rounds that it takes depend only on its prompt and seed.

    Attributes:
      runs: the iterators of `run`; holding them here keeps them from ending by garbage collection.
      running: number of requests in the engine.
      most_running: the largest number so far.
      params: sampling parameters of every request.
      template_kwargs: arguments of the chat template of every request.
      flags: other options of every request that were given.
    """

    def __init__(self, slots=2, *, asks_again=True, seconds=0.0):
        """Makes an engine.

        Args:
          asks_again: whether `run` asks its iterable for more requests after it has ended.
          seconds: duration of a round.
        """
        self.max_pending = 2 * slots
        self.running = self.most_running = 0
        self.params, self.template_kwargs, self.flags = [], [], []
        self.runs = []
        self._asks_again = asks_again
        self._seconds = seconds

    def make_request(
        self, prompt, params, *, raw=False, chat_template_kwargs=None, is_streamed=False, **flags
    ):
        if "long" in str(prompt):
            raise ValueError("prompt is too long")
        params = dataclasses.replace(params, max_new_tokens=params.max_new_tokens or 256)
        self.params.append(params)
        self.template_kwargs.append(chat_template_kwargs)
        self.flags.append(flags)
        rounds = 1000 if "slow" in str(prompt) else 1 + hash_json([prompt, params.seed], 1)[0] % 7
        ids = [-1] if "fail" in str(prompt) else list(hash_json(prompt, 4))
        return FakeRequest(ids, params, rounds)

    def room(self, num_prompt_tokens):
        return 1000 - num_prompt_tokens

    def run(self, requests, *, ended=None):
        self.runs.append(self._run(requests))
        return self.runs[-1]

    def _run(self, requests):
        numbered, pending = enumerate(requests), {}
        has_ended = False
        try:
            while True:
                room = self.max_pending - len(pending)
                taken = [] if has_ended else list(islice(numbered, room))
                has_ended = not self._asks_again and len(taken) < room
                pending |= {request: index for index, request in taken}
                self.running += len(taken)
                self.most_running = max(self.most_running, self.running)
                if not pending:
                    return
                time.sleep(self._seconds)
                for request in pending:
                    request.rounds -= 1
                for request in [request for request in pending if request.rounds <= 0]:
                    self.running -= 1
                    yield pending.pop(request), self._answer(request)
        finally:
            self.running -= len(pending)

    def _answer(self, request):
        rng = random.Random(f"{request.prompt} {request.params.seed}")
        tokens = [rng.randrange(128) for _ in range(request.params.max_new_tokens)]
        stats = AcceptanceStats()
        for _ in tokens:
            stats.add_step(2, 1)
        text, seed = " ".join(f"w{i}" for i in tokens), request.params.seed
        ended = ("failed", "it is a fake") if request.prompt == [-1] else ("length", None)
        return Generation(text, tokens, ended[0], request.prompt, stats, seed, error=ended[1])
