"""Stands in for the encoder of a multimodal model, so that both workers of an example know what is right."""

from typing import Any

import numpy as np

import towline

WIDTH = 4096


def embed(text: str) -> Any:
    """One row per character, in shared memory: peers on the same host map it. Any contiguous array would do."""
    embedding = towline.empty((len(text), WIDTH), "float32")
    embedding[:] = np.outer([ord(character) for character in text], np.arange(WIDTH))
    return embedding
