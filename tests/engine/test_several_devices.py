"""Programs over several devices, on CPU devices: every family, how weights are split and what is refused.

`test_pairs.py` has every drafter over the kinds of attention that make a difference to it, and what moves.
"""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from several_devices import CONSTRAINED, PROMPTS, run, run_apart

import jaxspec
from jaxspec.config import MESH_AXIS, EngineConfig, ModelConfig
from jaxspec.engine.api import devices
from jaxspec.engine.api.devices import check_devices
from jaxspec.sharding import on_shards

FAMILIES = (
    *("gemma3@2", "gpt-oss@2", "inner width@2", "qwen3-moe@2", "qwen3-next@2", "nemotron-h@2", "olmo3@2"),
    *("phi3@2", "minimax-m2@2", "gemma4-moe@2", "lfm2-biased@2", "deepseek-v3@4", "qwen3-5@4"),
)
"""With the number of devices; more of them than key/value heads copy those. Families whose parameters are all
split as another one's are left out, and `test_pairs.py` has a Llama on two devices and on four."""


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_answers_as_on_one_device(case):
    """Or as in transformers, where `models` compares one device with that."""
    result = run("families", case)[case]
    assert result["same"]
    assert result["split"] > 0.3


def test_chosen_experts_run_on_shards():
    """The kernel that no drafter's target has; of the others `test_pairs.py` says so."""
    case = "inner width@2"
    assert run("families", case)[case]["kernels"]["expert_matmul"] == 2


def test_greedy_answers_and_scores_have_the_log_probabilities_of_one_device():
    """Logits stay split over the devices, 24 or 12 of 48 on each."""
    found = run("logprobs", "1", "2", "4")
    for count in ("2", "4"):
        for alone, split in zip(found["1"], found[count], strict=True):
            assert split[0] == alone[0]
            np.testing.assert_allclose(split[1], alone[1], atol=1e-4, rtol=0)
            np.testing.assert_allclose(np.array(split[2])[..., 1], np.array(alone[2])[..., 1], atol=1e-4)
            assert np.mean(np.array(split[2])[..., 0] == np.array(alone[2])[..., 0]) > 0.99
        for alone, split in zip(found["1 scores"], found[f"{count} scores"], strict=True):
            np.testing.assert_allclose(split, alone, atol=1e-4, rtol=0)
        for i, (_, logprobs, _) in enumerate(found[count]):
            size = len(PROMPTS[i])
            of_answer = found[f"{count} scores"][0][i][size : size + len(logprobs)]
            np.testing.assert_allclose(of_answer, logprobs, atol=1e-4, rtol=0)
        devices, sampled = found[f"{count} samples"]
        assert devices == 1
        np.testing.assert_allclose(sampled, found["1 samples"][1], atol=1e-4, rtol=0)


def test_constrained_answers_are_those_of_one_device():
    """Greedy logits stay split over the devices, and so do those of EAGLE-3's and DFlash's drafts."""
    found = run("constraints", *(f"{name}@{count}" for name in CONSTRAINED for count in (1, 2)))
    for name in CONSTRAINED:
        assert found[f"{name}@2"] == found[f"{name}@1"], name


STORED = {"safetensors": 0, "gguf": 2}
"""What the tensors of a parameter hold on the host, in sizes of it in bfloat16: a safetensors file is mapped,
the tensors of a GGUF are dequantized to float32. (Python does not see what orbax holds.)"""


@pytest.fixture(scope="module")
def loadings():
    """In a process of their own, whose memory is measured."""
    return run_apart("loading", *STORED)


@pytest.mark.parametrize("name", STORED)
def test_weights_come_to_the_host_part_by_part(loadings, name):
    loaded = loadings[name]
    assert loaded["same"]
    assert max(size for size, _, _ in loaded["peaks"]) >= 8 << 20
    assert all(part <= size // 2 for size, part, _ in loaded["peaks"] if size == 8 << 20)
    over = too_large(loaded["peaks"], STORED[name])
    # A device copies a part or not, by where it lies, and so small objects count or not: in one process of
    # four they are 70 KB too much. A parameter that is over has to be so in three processes.
    for _ in range(2):
        if over:
            over &= too_large(run_apart("loading", name)[name]["peaks"], STORED[name])
    assert over == set()


def too_large(peaks, stored):
    """The indices of the parameters that need more memory than they may."""
    before, over = 0, set()
    for i, (size, part, peak) in enumerate(peaks):
        # The devices' own memory is the host's here; beside it a part's tensors side by side, in float32.
        needed = 2 * part + stored * size
        if peak > max(size + needed, before) + (1 << 15):
            over.add(i)
        before = needed
    return over


def test_a_mesh_of_one_is_the_program_itself():
    def program(x):
        return x

    mesh = Mesh(np.asarray(jax.devices()[:1]), (MESH_AXIS,))
    whole = NamedSharding(mesh, PartitionSpec())
    assert on_shards(program, mesh, (whole,), whole) is program


LLAMA = ModelConfig("llama", 48, 32, 48, 2, 4, 2, 8)


def test_a_feed_forward_width_that_does_not_divide_is_refused():
    with pytest.raises(jaxspec.ConfigError, match=r"engine\.tensor_parallel is 5, .* width of 48"):
        check_devices(EngineConfig(tensor_parallel=5), LLAMA)


def test_heads_that_do_not_divide_are_warned_about():
    with pytest.warns(UserWarning, match=r"the model's 2 key/value heads, so every device keeps all"):
        check_devices(EngineConfig(tensor_parallel=3), LLAMA)
    check_devices(EngineConfig(tensor_parallel=4), LLAMA)  # every device has one head and one of its queries


def test_gpus_without_nccl_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "platform", lambda: "gpu")
    monkeypatch.setattr(devices, "_has_nccl", lambda: False)
    with pytest.raises(jaxspec.ConfigError, match=r"engine\.tensor_parallel is 2, but NCCL is missing"):
        check_devices(EngineConfig(tensor_parallel=2), LLAMA)
    check_devices(EngineConfig(), LLAMA)
