"""The constraints of a row of logits by their definitions, one token at a time in NumPy."""

import numpy as np


def constrained(logits, tokens, prompt_length, stop_tokens=(), **asked):
    """The logits f64[V] of the token after a text as constraints change them.

    Args:
      tokens: the text, the prompt of `prompt_length` tokens first.
      stop_tokens: the ids that end the output.
      **asked: fields of `SamplingParams`; those that constrain nothing are ignored.
    """
    x = np.array(logits, np.float64)
    text, output = list(tokens), list(tokens[prompt_length:])
    for token, bias in dict(asked.get("logit_bias", {})).items():
        x[token] += bias
    for token in set(text):
        x[token] = penalised(x[token], asked.get("repetition_penalty", 1.0))
    for token in set(output):
        x[token] -= asked.get("frequency_penalty", 0.0) * output.count(token)
        x[token] -= asked.get("presence_penalty", 0.0)
    if len(output) < asked.get("min_tokens", 0):
        x[list(stop_tokens)] = -np.inf
    for word in asked.get("bad_words", ()):
        if len(text) >= len(word) - 1 and text[len(text) - len(word) + 1 :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    if size := asked.get("no_repeat_ngram_size", 0):
        for start in range(len(text) - size + 1):
            *before, last = text[start : start + size]
            if before == text[len(text) - size + 1 :]:
                x[last] = -np.inf
    return x


def penalised(logit, penalty):
    return logit / penalty if logit > 0 else logit * penalty
