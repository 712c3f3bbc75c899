"""The command line, in this process."""

import pytest
from golden_files import golden_folder, quantized_folder

from jaxspec.commands import inspect as inspect_head


@pytest.fixture
def run(capsys):
    """Runs the command; returns its exit status, and what it printed."""

    def run(*arguments):
        status = inspect_head.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_a_head_with_its_target(run):
    status, text = run(golden_folder("eagle3-safeailab"), "--target", golden_folder("llama-seven-layers"))
    assert status == 0
    assert "checkpoint: an EAGLE-3 head, SafeAILab\n" in text
    assert "llama-seven-layers/checkpoint: fits\n" in text
    assert "norm before residual       False  (assumed: " in text
    assert text.endswith("ignores no tensor\n")


def test_how_devices_would_split_a_model(run):
    status, text = run(quantized_folder("fp8-blocks"), "--tensor-parallel", "2")
    assert status == 0
    split = text.partition("split   ")[2].partition("ignores ")[0]
    lines = dict(line.strip().rsplit(": ", 1) for line in split.splitlines())
    heads = "cut by kv_heads, dequantized because its blocks would be cut"
    assert lines["cut by kv_heads"] == "model.layers.*.self_attn.q_proj.weight (1)"
    assert lines[heads] == "model.layers.*.self_attn.o_proj.weight (1)"
    assert "model.norm.weight (1)" in lines["whole"]
    assert "split" not in run(quantized_folder("fp8-blocks"))[1]


def test_a_head_with_another_target(run):
    status, text = run(golden_folder("eagle3-safeailab"), "--target", golden_folder("llama-tied"))
    assert status == 1
    assert "llama-tied/checkpoint: the head is for targets of hidden size 16, this one has 32\n" in text


def test_a_configuration_stands_for_its_drafter_and_its_target(run, tmp_path):
    config = tmp_path / "pair.toml"
    drafter = f'[drafter]\nkind = "dflash"\nsource = "{golden_folder("dflash")}"\n'
    config.write_text(f'[target]\nsource = "{golden_folder("llama-tied")}"\n{drafter}', "utf-8")
    assert run(config)[0] == 0
    assert "a DFlash head" in run(config)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder/here"], "no such file or folder"),
        ([golden_folder("dflash"), "--target", "no/such/folder/here"], "no such file or folder"),
        (["smollm2-135m-ngram"], "its drafter 'ngram' has no checkpoint"),
        ([golden_folder("dflash"), "--tensor-parallel", "2"], "only a whole model can be split"),
        ([golden_folder("dflash"), "--tensor-parallel", "0"], "must be at least 1"),
        (["missing.toml"], "missing.toml: no such file or folder"),
    ],
)
def test_bad_input_is_one_line(run, arguments, message):
    status, text = run(*arguments)
    assert status == 2
    assert text.startswith("error: ")
    assert message in text
    assert text.count("\n") == 1
