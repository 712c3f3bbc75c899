import pytest

from jaxspec.errors import OneLineError
from jaxspec.sampling import generation_defaults


@pytest.mark.parametrize(
    ("generation", "fields"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}, None),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.7, "bos_token_id": 1}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 3}, {"temperature": 0.0}),
        ({"temperature": None, "max_new_tokens": 9, "eos_token_id": [1, 2]}, {}),
    ],
)
def test_what_says_how_tokens_are_chosen_and_nothing_else(generation, fields):
    assert generation_defaults(generation) == (generation if fields is None else fields)


def test_a_bad_value_names_the_file_and_the_field():
    with pytest.raises(OneLineError, match=r"^generation_config.json: top_p must be a number, above 0"):
        generation_defaults({"top_p": 7})
    with pytest.raises(
        OneLineError, match=r"^generation_config.json: do_sample must be true or false, got 'fa"
    ):
        generation_defaults({"do_sample": "false"})
