"""The subcommands of `jaxspec`, a module each with a `main`. None imports JAX before it must."""

COMMANDS = {
    "generate": "answer one prompt; the name may be left out, unless the prompt is one of these words",
    "chat": "take turns",
    "batch": "answer files of prompts",
    "serve": "answer over HTTP, as OpenAI's API does",
    "train": "train an EAGLE-3 head, or adapt one",
    "inspect": "describe a drafter's checkpoint",
    "convert": "write a checkpoint in another format",
    "bench": "measure tokens per second with and without drafts",
}
