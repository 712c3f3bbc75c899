"""GGUF files: header, tensors, tokenizer, and the checkpoint that they stand for."""
