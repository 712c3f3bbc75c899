"""Text and tokens: tokenizers, messages, chat templates, streams of text."""
