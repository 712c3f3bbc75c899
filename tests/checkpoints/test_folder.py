import pytest
from tiny_folder import CONFIG, arrays, assert_same_tensors, write_folder, write_json, write_tokenizer

from jaxspec.checkpoints import CheckpointError, open_checkpoint


def test_head_without_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path))
    assert checkpoint.config == CONFIG
    assert checkpoint.name == str(tmp_path)
    assert checkpoint.tokenizer is None
    assert checkpoint.eos_token_ids == (7,)
    assert_same_tensors(checkpoint.tensors, arrays())


def test_nested_config_is_passed_as_it_is(tmp_path):
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 4, "x": [1]}}
    write_json(write_folder(tmp_path) / "config.json", nested)
    assert open_checkpoint(tmp_path).config == nested


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    write_tokenizer(write_folder(tmp_path))
    assert open_checkpoint(tmp_path).eos_token_ids == (7, 2)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 2]})
    assert open_checkpoint(tmp_path).eos_token_ids == (5, 2)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": {"id": 5}})
    with pytest.raises(CheckpointError, match="eos_token_id must be an integer or a list of them"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "file not found"), ("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")],
)
def test_config_must_be_a_json_object(tmp_path, content, message):
    path = write_folder(tmp_path) / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        open_checkpoint(tmp_path)
