import numpy as np
import pytest
from tiny_tokenizers import byte_level

from jaxspec.checkpoints import CheckpointError
from jaxspec.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxspec.engine.prompts import encode_prompt

ROOM = 2048


class CountingBackend:
    """A backend that counts the characters that it reads."""

    def __init__(self, backend):
        self._backend = backend
        self.num_read = 0

    def encode(self, text, **options):
        self.num_read += len(text)
        return self._backend.encode(text, **options)


@pytest.fixture
def tokenizer():
    tokenizer = tokenizer_from_gguf(byte_level(), "file")
    tokenizer.backend = CountingBackend(tokenizer.backend)
    return tokenizer


def encode(tokenizer, prompt, *, raw=False, vocab_size=267):
    return encode_prompt(prompt, tokenizer, raw=raw, vocab_size=vocab_size, max_tokens=ROOM)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("as_messages", [False, True])
def test_a_text_far_too_long_is_refused_before_it_is_read(tokenizer, raw, as_messages):
    text = "hello world " * 500_000
    prompt = [{"role": "user", "content": "hi"}, {"role": "user", "content": text}] if as_messages else text
    with pytest.raises(CheckpointError, match="text of 6000000 characters makes more than 2048 tokens"):
        encode(tokenizer, prompt, raw=raw)
    assert tokenizer.backend.num_read < 20 * ROOM


def test_a_template_that_repeats_a_text_is_refused_as_one_that_is_too_long(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content * 1000 }}"
    with pytest.raises(CheckpointError, match="text of 6000000 characters makes more than 2048 tokens"):
        encode(tokenizer, "hello " * 1000)
    assert tokenizer.backend.num_read < 20 * ROOM


def test_a_text_that_may_fit_is_read_once(tokenizer):
    text = "hello" * ROOM
    assert len(encode(tokenizer, text, raw=True)) == ROOM
    assert tokenizer.backend.num_read == len(text)


def test_a_long_text_of_few_tokens_fits(tokenizer):
    values = byte_level()
    values["tokenizer.ggml.tokens"].append("h" * 50)
    values["tokenizer.ggml.token_type"].append(4)
    tokenizer = tokenizer_from_gguf(values, "file")
    assert encode(tokenizer, "h" * 50 * ROOM, raw=True, vocab_size=268) == [267] * ROOM


def test_a_tokenizer_with_more_tokens_than_the_model_is_noticed(tokenizer):
    with pytest.raises(ValueError, match="prompt: token id 266 is outside the vocabulary of 266"):
        encode(tokenizer_from_gguf(byte_level("llama-bpe"), "file"), "hey", raw=True, vocab_size=266)


@pytest.mark.parametrize(
    "prompt", [[5, np.int32(6), np.uint8(7)], np.array([5, 6, 7]), (5, 6, 7), range(5, 8)]
)
def test_token_ids_of_any_integer_type_become_ints(prompt):
    ids = encode(None, prompt)
    assert ids == [5, 6, 7]
    assert set(map(type, ids)) == {int}


@pytest.mark.parametrize(
    "prompt", [[5, True], [5, "w6"], [5, {"role": "user", "content": "w6"}], [5, 6.0], [[5]]]
)
def test_what_is_not_a_list_of_token_ids_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt must be a string, a list of token ids"):
        encode(None, prompt)


@pytest.mark.parametrize(
    ("prompt", "outside"), [([5, -1], -1), ([5, -1, 300], -1), ([300, 5, -1], 300), ([267], 267)]
)
def test_the_first_id_outside_the_vocabulary_is_named(prompt, outside):
    with pytest.raises(ValueError, match=f"token id {outside} is outside the vocabulary of 267"):
        encode(None, prompt)
