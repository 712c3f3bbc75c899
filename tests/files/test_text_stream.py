import numpy as np
import pytest
from tiny_tokenizers import byte_level, sentence_piece

from jaxspec.files import TextStream
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf

TOKENIZERS = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}
TEXT = "hit hello w 東京 🎉🏽</s><a tool> hi <s>é ½"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return tokenizer_from_gguf(TOKENIZERS[request.param], "tiny")


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_whole_text(tokenizer, skip):
    ids = tokenizer.encode(TEXT)
    stream = TextStream(tokenizer.backend, skip_special_tokens=skip)
    pieces = [stream.feed([i]) for i in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_join_to_the_whole_text(tokenizer, seed):
    # Random bytes are mostly no UTF-8, and ids past the vocabulary are padded rows of a model.
    ids = np.random.default_rng(seed).integers(0, tokenizer.vocab_size + 5, 60).tolist()
    stream = TextStream(tokenizer.backend)
    pieces = [stream.feed(ids[i : i + 3]) for i in range(0, 60, 3)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("names", [["<0x20>"], ["<0x20>", "▁hi"], ["<0x0A>", "▁hi"], ["<0xC3>", "▁hi"]])
@pytest.mark.parametrize("before", [[], ["it"]])
def test_bytes_at_the_start_of_a_text_join_to_the_whole_text(before, names):
    """The decoder strips a text's first space, and no other."""
    tokenizer = tokenizer_from_gguf(sentence_piece(), "tiny")
    ids = [tokenizer.backend.token_to_id(name) for name in [*before, *names]]
    stream = TextStream(tokenizer.backend)
    assert "".join(stream.feed([i]) for i in ids) + stream.finish() == tokenizer.decode(ids)


def test_a_character_comes_out_when_it_is_whole(tokenizer):
    ids = tokenizer.encode("🎉", add_special_tokens=False)[-4:]  # the character is four byte tokens
    stream = TextStream(tokenizer.backend)
    assert stream.feed(ids[:3]) == ""
    assert stream.feed(ids[3:]) == "🎉"
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["hi\n\n\nhi it", "안녕 hi", "\n hi", " \n", "東 京🎉"])
def test_every_character_comes_out_with_its_last_token(tokenizer, text):
    """In many SentencePiece vocabularies a line break is a byte, and a run of bytes may be long."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer.backend)
    for count, token in enumerate(ids, 1):
        so_far = tokenizer.decode(ids[:count])
        piece = stream.feed([token])
        assert bool(piece) == (not so_far.endswith("\N{REPLACEMENT CHARACTER}") and so_far != "")
    assert stream.finish() == ""


def test_bytes_that_are_no_text_leave_those_beside_them_alone(tokenizer):
    names = ["A", "Ã", "A"]
    if tokenizer.backend.token_to_id("A") is None:
        names = ["<0x41>", "<0xC3>", "<0x41>"]
    ids = [tokenizer.backend.token_to_id(name) for name in names]
    assert tokenizer.decode(ids) == "A\N{REPLACEMENT CHARACTER}A"
    stream = TextStream(tokenizer.backend)
    assert [stream.feed([i]) for i in ids] == ["A", "", "\N{REPLACEMENT CHARACTER}A"]


def test_half_a_character_is_replaced_at_the_end(tokenizer):
    ids = tokenizer.encode("hi 🎉")[:-1]
    stream = TextStream(tokenizer.backend)
    text = stream.feed(ids) + stream.finish()
    assert text == tokenizer.decode(ids)
    assert text.endswith("\N{REPLACEMENT CHARACTER}")
