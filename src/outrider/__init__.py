"""Outrider: one exact decode loop for language models."""

__version__ = "0.1.0"
