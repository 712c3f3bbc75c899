"""Programs over several devices, on CPU devices: what a GPU runs, with the reference kernels inside.

Answers and what was accepted of drafts are those of one device, in float32, and nothing moves between devices
but sums of activations, the maxima of logits, and for sampling rows of logits.
"""

import json
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_engines import ATTENTION, DRAFTERS, PAIRS

import jaxspec
from jaxspec.config import MESH_AXIS, EngineConfig, ModelConfig
from jaxspec.engine import devices
from jaxspec.engine.devices import check_devices
from jaxspec.sharding import on_shards

PROGRAM = Path(__file__).parents[1] / "several_devices.py"
BATCH, WIDTH, VOCABULARY = 3, 32, 48
BY_KIND = {kind: [name for of, name in PAIRS if of == kind] for kind in ATTENTION}
ON_TWO = [
    (2, kind, tuple(names[at : at + 3])) for kind, names in BY_KIND.items() for at in range(0, len(names), 3)
]
# Two key/value heads stay whole on four devices; those of P-EAGLE and DFlash, four, are split, and so are the
# latent kind's.
ON_FOUR = [(4, "full", ("eagle3", "eagle1", "peagle", "dflash")), (4, "latent", ("ngram", "mtp"))]
FAMILIES = {
    2: (
        *("llama-tied", "qwen2-tied", "qwen3-windowed", "gemma3", "gpt-oss", "inner width", "qwen3-moe"),
        *("deepseek-v3", "deepseek-v3-direct", "glm4-moe-lite"),
    ),
    4: ("gpt-oss", "deepseek-v3"),
}


@cache
def run(count, *arguments):
    """What `several_devices.py` prints."""
    command = [sys.executable, str(PROGRAM), str(count), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_only_meant(moves, count, largest_gather):
    """Sums are of rows as wide as the model, and what is gathered has at most so many numbers."""
    for operation, shapes in moves:
        assert operation in ("all-reduce", "all-gather"), (operation, shapes)
        for shape in shapes:
            if operation == "all-reduce":
                assert shape[-1] == WIDTH, shape
            else:
                assert prod(shape) <= largest_gather, shape


@pytest.mark.parametrize(("count", "kind", "names"), [*ON_TWO, *ON_FOUR], ids=str)
def test_every_drafter_over_every_attention_answers_as_on_one_device(count, kind, names):
    for name, result in run(count, "pairs", kind, "greedy", *names).items():
        assert result["same"], name
        assert result["kernels"]["matmul"] == count
        # An index and a value of every row, from each device.
        assert_only_meant(result["moves"], count, 2 * count * BATCH * (DRAFTERS[name] + 1))


def test_sampled_answers_too():
    results = run(2, "pairs", "full", "sampled", "eagle3", "peagle", "dflash", "near split")
    for name, result in results.items():
        assert result["same"], name
        assert_only_meant(result["moves"], 2, BATCH * (DRAFTERS["near"] + 1) * VOCABULARY)
    assert len({str(result["answers"]) for result in results.values()}) > 1


def test_every_kernel_runs_on_shards():
    """XLA cannot split a kernel: one outside of `on_shards` would be given whole caches, if it ran at all."""
    results = [run(2, "pairs", kind, "greedy", *names[:3]) for kind, names in BY_KIND.items()]
    kernels = {name for result in results for one in result.values() for name in one["kernels"]}
    kernels |= run(2, "families", *FAMILIES[2])["inner width"]["kernels"].keys()
    assert kernels == {
        *("matmul", "place_rows", "slot_mapping", "gumbel_sample", "rope_kv_write", "paged_attention"),
        *("latent_write", "latent_attention", "expert_matmul", "kv_write", "indexed_attention"),
    }


def test_a_layer_is_two_sums_and_a_draw_one_exchange():
    plain, eagle3 = (run(2, "pairs", "full", "greedy", name)[name]["moves"] for name in ("none", "eagle3"))
    count = [[operation for operation, _ in moves].count for moves in (plain, eagle3)]
    assert [of("all-reduce") for of in count] == [2 * 2, 2 * 2 + 2 + 2]  # the head drafts, and is refreshed
    # The best token and whether its row is finite; the first draft and the loop's.
    assert [of("all-gather") for of in count] == [2, 2 + 2]


def test_a_small_draft_model_is_whole_on_every_device():
    small, split = (run(2, "pairs", "full", "greedy", name)[name] for name in ("near", "near split"))
    assert small["same"]
    assert split["same"]
    assert len(small["moves"]) < len(split["moves"])
    assert small["split"] < 0.6 < split["split"]


@pytest.mark.parametrize("count", FAMILIES)
def test_every_family_answers_as_on_one_device(count):
    for name, result in run(count, "families", *FAMILIES[count]).items():
        assert result["same"], name
        assert result["split"] > 0.3, name


def test_weights_come_to_the_host_part_by_part():
    loaded = run(2, "loading")
    assert loaded["same"]
    assert max(size for size, _, _ in loaded["peaks"]) >= 8 << 20
    for size, part, peak in loaded["peaks"]:
        # The devices' own memory is the host's here; beside it a part's tensors side by side, in float32.
        assert peak <= size + 2 * part + (1 << 16)
    assert all(part <= size // 2 for size, part, _ in loaded["peaks"] if size == 8 << 20)


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
        check_devices(EngineConfig(tensor_parallel=4), LLAMA)


def test_a_host_driven_loop_is_for_one_device():
    with pytest.raises(jaxspec.ConfigError, match=r"engine\.draft_loop 'host' runs on one device"):
        check_devices(EngineConfig(tensor_parallel=2, draft_loop="host"), LLAMA)


def test_gpus_without_nccl_are_refused(monkeypatch):
    monkeypatch.setattr(devices.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(devices, "_has_nccl", lambda: False)
    with pytest.raises(jaxspec.ConfigError, match=r"engine\.tensor_parallel is 2, but NCCL is missing"):
        check_devices(EngineConfig(tensor_parallel=2), LLAMA)
    check_devices(EngineConfig(), LLAMA)
