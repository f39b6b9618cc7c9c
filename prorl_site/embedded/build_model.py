"""Builds model folders that vLLM can serve. Runs inside the vLLM virtual environment, as a program, not as an import.

    python build_model.py smollm2 GGUF_FILE OUT_DIR     # 4-bit GGUF -> bfloat16 safetensors, 269 MB, about 20 s
    python build_model.py tiny GGUF_FILE OUT_DIR        # its tokenizer on a random 2-layer Llama, float32, 13 MB, for tests
    python build_model.py tiny-vision GGUF_FILE OUT_DIR # such a Llama behind random eyes (Idefics3), 13 MB, for tests

OUT_DIR appears only when it is complete: a run that was interrupted leaves `OUT_DIR.partial`, which the next one replaces.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

TURN_ENDS = 1.5  # measured: the end of turn is then one in 25 tokens
TILE = 56  # pixels
PICTURE = "<image>"
OTHER_PICTURE_TOKENS = (
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)  # the processor asks for them by name
CHAT_WITH_PICTURES = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}
{%- endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


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
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = LlamaForCausalLM(_tiny_config(tokenizer)).to(torch.float32)
    _let_turns_end(model.model.embed_tokens, tokenizer.eos_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def random_idefics(gguf: Path, out: Path) -> None:
    """Saves an Idefics3 with random weights, whose text model is as `random_llama`'s, into `out`. Same weights on every call.

    A picture is cut into rows and columns by its shape, so that pictures of different shapes become different numbers of ids.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE, *OTHER_PICTURE_TOKENS]})
    eyes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config=eyes | {"image_size": TILE, "patch_size": TILE // 4},
        text_config=_tiny_config(tokenizer).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids(PICTURE),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Idefics3ForConditionalGeneration(config).to(torch.float32)
    _let_turns_end(model.model.text_model.embed_tokens, tokenizer.eos_token_id)
    model.save_pretrained(out)
    cutting = Idefics3ImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(image_processor=cutting, tokenizer=tokenizer, image_seq_len=4)
    processor.chat_template = CHAT_WITH_PICTURES
    processor.save_pretrained(out)


def _tiny_config(tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
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


def _let_turns_end(embeddings: Any, end: int) -> None:
    """One dimension is the same for all tokens, and so in all states; the end of turn is the one that it speaks for."""
    embeddings.weight.data[:, 0] = 0.2
    embeddings.weight.data[end, 0] = 0.2 + TURN_ENDS


def main(kind: str, source: str, out: str) -> None:
    build = {"smollm2": convert_gguf, "tiny": random_llama, "tiny-vision": random_idefics}[kind]
    target = Path(out)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build(Path(source), partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
