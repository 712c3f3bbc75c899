import pytest

from jaxspec.errors import OneLineError


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("as it is:  two  spaces é 🎉", "as it is:  two  spaces é 🎉"),
        (ValueError("of an error"), "of an error"),
        ("two\nlines\t\r\n and more", "two lines and more"),
        ("\x1b[31mred\x00 \ud800", "\\x1b[31mred\\x00 \\ud800"),
        ("a" * 2000 + "b" * 2000, "a" * 497 + " … " + "b" * 500),
    ],
)
def test_a_message_is_one_line_of_characters_that_can_be_printed(message, line):
    assert str(OneLineError(message)) == line


def test_a_message_that_grows_when_it_is_spelled_out_is_cut_again():
    assert len(str(OneLineError("\x00" * 900))) == 1000
