"""A program for type checkers: what its calls return, and mistakes in lines that end with `# wrong`.

It is read by `test_types.py` and never run.
"""

from typing import assert_type

import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import AsyncEngine, Generation, SamplingParams

engine = jaxspec.load("smollm2-135m", batch_size=1, dtype="float32")
assert_type(engine.generate("Hi", max_new_tokens=3, stop="a", raw=True), Generation)
assert_type(engine.generate("Hi", {"temperature": 1.0}), Generation)
assert_type(engine.generate(["Hi", "there"], seed=[1, None]), list[Generation])
assert_type(engine.generate("Hi", n=2, best_of=3), list[Generation])
assert_type(engine.generate(["Hi"], n=2), list[list[Generation]])
assert_type(engine.generate([1, 2, 3], n=None), Generation)
assert_type(engine.generate(np.array([1, 2, 3])), Generation)
assert_type(engine.generate(jnp.array([1, 2, 3])), Generation)
assert_type(engine.generate([np.array([1, 2]), np.array([3])]), list[Generation])
assert_type(engine.generate([{"role": "user", "content": "Hi"}]), Generation)
assert_type(jaxspec.generate("Hi", "x", temperature=0.5, engine={"batch_size": 2}), Generation)
assert_type(jaxspec.generate(["Hi"], n=2, drafter="ngram"), list[list[Generation]])
engine.sample(jnp.array([1, 2]), n=2, length=9, seed=np.array([1]))
engine.score(np.zeros((2, 3), np.int32), lengths=jnp.array([1, 2]), hidden=(1, "last"))
for piece in engine.stream("Hi", {"temperature": 1.0}, priority=2):
    print(piece.text)
SamplingParams(stop=["a", "b"], stop_token_ids=np.array([1]), logit_bias={5: 1.0}, bad_words=["a", [1, 2]])
SamplingParams(choice=["a", "b"], seed=None, logprobs_mode="processed_logprobs")


async def ask(client: AsyncEngine) -> None:
    assert_type(await client.generate("Hi", n=3, priority=2), list[Generation])
    assert_type(await client.generate(["Hi"], deadline=1.0), list[Generation])
    await client.sample("Hi", n=3, length=9)
    await client.score("Hi", top=3)
    await client.generate("Hi", temprature=1)  # wrong
    await client.sample("Hi", nn=3)  # wrong
    await client.score("Hi", topp=3)  # wrong
    async for _ in client.stream("Hi", seed=[1]):  # wrong
        pass


engine.generate("Hi", temprature=1)  # wrong
engine.generate("Hi", max_new_tokens="3")  # wrong
engine.generate(["Hi"], n="2")  # wrong
engine.generate(3)  # wrong
engine.stream("Hi", max_tokens=3)  # wrong
engine.sample("Hi", lenght=3)  # wrong
engine.score("Hi", hidden="first")  # wrong
engine.default_params(temp=1)  # wrong
engine.make_request("Hi", SamplingParams(), prio=1)  # wrong
jaxspec.load("x", batchsize=1)  # wrong
jaxspec.generate("Hi", drafer="ngram")  # wrong
jaxspec.generate("Hi", engine={"batchsize": 1})  # wrong
jaxspec.inspect_steps(engine, "Hi", max_tokens=1)  # wrong
SamplingParams(temprature=1)  # wrong
SamplingParams(logprobs_mode="raw")  # wrong
