"""Builds model folders that vLLM can serve. Runs inside the vLLM virtual environment, as a program, not as an import.

    python build_model.py smollm2 GGUF_FILE OUT_DIR     # 4-bit GGUF -> bfloat16 safetensors, 269 MB, about 20 s
    python build_model.py tiny GGUF_FILE OUT_DIR        # its tokenizer on a random 2-layer Llama, float32, 13 MB, for tests

OUT_DIR appears only when it is complete: a run that was interrupted leaves `OUT_DIR.partial`, which the next one replaces.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

TURN_ENDS = 1.5  # measured: the end of turn is then one in 25 tokens


def convert_gguf(gguf: Path, out: Path) -> None:
    """Dequantises `gguf` and saves weights, tokenizer and chat template into `out`."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # type: ignore[import-not-found]

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    dequantize = GgufConfig(dequantize=True)  # otherwise the weights stay packed and cannot be saved
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=dequantize).save_pretrained(out)


def random_llama(gguf: Path, out: Path) -> None:
    """Saves a Llama with random weights and the tokenizer of `gguf` into `out`. Same weights on every call.

    It says anything, but ends its turn after some twenty tokens, as a chat model does and random weights do not.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        # One dimension is the same for all tokens, and so in all states; the end of turn is the one that it speaks for.
        model.model.embed_tokens.weight[:, 0] = 0.2
        model.model.embed_tokens.weight[tokenizer.eos_token_id, 0] = 0.2 + TURN_ENDS
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(kind: str, source: str, out: str) -> None:
    build = {"smollm2": convert_gguf, "tiny": random_llama}[kind]
    target = Path(out)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build(Path(source), partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
