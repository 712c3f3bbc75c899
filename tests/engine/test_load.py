import pytest
from tiny_models import write_target
from tiny_tokenizers import byte_level

import jaxspec
from jaxspec.files import source
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf
from jaxspec.weights.loading import ModulePlan


def test_more_devices_than_there_are_are_refused(tiny_engines):
    with pytest.raises(jaxspec.ConfigError, match=r"engine\.tensor_parallel is 99, but jax sees"):
        jaxspec.load(tiny_engines.folders["target"], tensor_parallel=99, progress=False)


@pytest.mark.parametrize("model", ["x" * 5000, "~nobody-of-this-name/model", "a\0b"])
def test_a_name_that_can_be_no_path_is_refused_in_one_line(model):
    with pytest.raises((jaxspec.ConfigError, jaxspec.CheckpointError)):
        jaxspec.load(model)


@pytest.mark.parametrize("name", ["none", "near", "eagle3", "mtp"])
@pytest.mark.parametrize("progress", [True, False])
def test_progress_reaches_every_download(engines_of, monkeypatch, name, progress):
    folders = engines_of["latent" if name == "mtp" else "full"].folders
    shown = []

    def download(repository, file=None, *, progress):
        shown.append(progress)
        return folders[repository.removeprefix("org/")]

    monkeypatch.setattr(source, "hub_folder", download)
    # Before weights are read, and programs compiled.
    monkeypatch.setattr(ModulePlan, "read", _stop)
    kind = {"near": "draft_model"}.get(name, name)
    drafter = {"kind": kind} | ({} if name == "none" else {"source": f"org/{name}"})
    with pytest.raises(_StoppedError):
        jaxspec.load("org/mtp" if name == "mtp" else "org/target", drafter=drafter, progress=progress)
    assert shown == [progress] * (1 if name == "none" else 2)


class _StoppedError(Exception):
    pass


def _stop(*args, **kwargs):
    raise _StoppedError


def test_a_draft_model_with_other_tokens_is_refused(tmp_path):
    folders = []
    for name, order in (("target", 1), ("draft", -1)):
        folders.append(write_target(tmp_path / name, vocab_size=400))
        values = byte_level()
        values["tokenizer.ggml.tokens"][40:42] = values["tokenizer.ggml.tokens"][40:42][::order]
        tokenizer_from_gguf(values, name).save(folders[-1])
    target, draft = folders
    with pytest.raises(jaxspec.ConfigError, match="must have the target's tokens, but token 40 is"):
        jaxspec.load(target, drafter={"kind": "draft_model", "source": str(draft)}, progress=False)
