"""Folders in Hugging Face's layout, read and written."""
