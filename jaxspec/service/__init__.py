"""Answers for others: OpenAI's API, HTTP, files of prompts, batch runs."""
