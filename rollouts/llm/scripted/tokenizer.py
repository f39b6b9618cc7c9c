"""A small deterministic tokenizer in which many id sequences decode to the same text.

Every byte is a token, and common pieces of text are tokens of their own. `encode` takes the longest piece; `sample` does not
always, as a sampling model does not. So whoever decodes a sampled reply and encodes it again gets other ids, and tests see it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Protocol

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PICTURE, FRAME = "<picture>", "<frame>"
_SPECIALS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
_OF_PICTURES = (PICTURE, FRAME)

_PIECES = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea
ra ce li ch ll be ma si om ur un us ut ol ct pr ab am ow id ad po so wh ot el ss ee oo the and ing ion tio ent ati for
her ter hat ere ate his con res ver all ons nce men ith ted ers pro wit are ess not ive was ect rea com eve per int est
sta ica ist ear one our num ber sum use run def len system user assistant tool name python bash print code call
arguments answer What Reply only boxed number problem think tool_call tool_response <tool_call> </tool_call> <think>
</think> ``` ```python {" "} ": == ** // \\boxed{ (" ")
"""


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    end_of_turn: int
    size: int

    def encode(self, text: str) -> list[int]:
        """The canonical ids; special tokens written out in `text` become their ids, as with real tokenizers."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str: ...

    def sample(self, text: str, rng: random.Random) -> list[int]:
        """Some ids that decode to `text`, not always the canonical ones."""
        ...


class ScriptedTokenizer:
    """Ids 0 to 255 are bytes, then come special tokens, pieces with and without a space before them, and those of pictures."""

    def __init__(self) -> None:
        pieces = (
            {f"{n:02}" for n in range(100)} | {space + piece for piece in _PIECES.split() for space in ("", " ")} | {"\n\n"}
        )
        self._texts = [bytes([value]) for value in range(256)]
        self._texts += [text.encode() for text in (*_SPECIALS, *sorted(pieces), *_OF_PICTURES)]
        self._special_ids = {special: self._texts.index(special.encode()) for special in (*_SPECIALS, *_OF_PICTURES)}
        special_ids = self._special_ids.values()
        self._ids = {text: number for number, text in enumerate(self._texts) if number not in special_ids}
        self._longest = max(map(len, self._ids))
        self.end_of_turn = self._special_ids[END_OF_TURN]
        self.size = len(self._texts)
        self._encode_word = cache(self._encode_new_word)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self._special_ids))})", text):
            if part in self._special_ids:
                ids.append(self._special_ids[part])
            else:
                for word in re.findall(r" ?\w+|\s+(?! \w)|[^\w\s]+|\s+", part):
                    ids += self._encode_word(word)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        specials = self._special_ids.values()
        return b"".join(self._texts[i] for i in ids if not (skip_special and i in specials)).decode("utf-8", "replace")

    def sample(self, text: str, rng: random.Random) -> list[int]:
        data, ids, position = text.encode(), [], 0
        while position < len(data):
            fitting = self._fitting(data, position)
            chosen = fitting[0] if rng.random() < 0.6 else rng.choice(fitting)
            ids.append(self._ids[chosen])
            position += len(chosen)
        return ids

    def _encode_new_word(self, word: str) -> tuple[int, ...]:
        data, ids, position = word.encode(), [], 0
        while position < len(data):
            chosen = self._fitting(data, position)[0]
            ids.append(self._ids[chosen])
            position += len(chosen)
        return tuple(ids)

    def _fitting(self, data: bytes, position: int) -> list[bytes]:
        """All ordinary tokens that `data` has at `position`, longest first; never empty."""
        candidates = (data[position : position + length] for length in range(self._longest, 0, -1))
        return list(dict.fromkeys(candidate for candidate in candidates if candidate in self._ids))
