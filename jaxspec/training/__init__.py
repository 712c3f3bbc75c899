"""Training EAGLE-3 heads: prompts, responses, draft vocabulary, training, evaluation and export."""
