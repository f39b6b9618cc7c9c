"""Prompts rendered in this process: the model's own tokenizer files and chat template, without its weights."""

from rollouts.llm.tokens.local import LocalTokenizer, LocalTokenizers
from rollouts.llm.tokens.proof import prove_equal

__all__ = ["LocalTokenizer", "LocalTokenizers", "prove_equal"]
