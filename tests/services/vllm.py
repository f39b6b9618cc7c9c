"""Real vLLMs with tiny random models: one for the whole test run, with other weights for it, and one that sees."""

from __future__ import annotations

import array
import json
import shutil
from pathlib import Path

from prorl_site.embedded.vllm import VllmHome, VllmServer
from prorl_site.embedded.vllm_install import TINY_MODEL, TINY_VISION_MODEL

CLONE = Path(__file__).resolve().parents[2]
MODEL_FILES = VllmHome(CLONE).models / TINY_MODEL
VISION_MODEL_FILES = VllmHome(CLONE).models / TINY_VISION_MODEL


def start_tiny_vllm() -> VllmServer:
    """Install what is missing and start it. Raises `VllmUnavailable`."""
    home = VllmHome(CLONE)
    # One thread: several wait for each other at every step, and on a busy machine for a long time.
    server = VllmServer(home, home.prepare_tiny(print), max_model_len=2048, threads=1)
    server.start()
    return server


def start_tiny_vision_vllm() -> VllmServer:
    """Like `start_tiny_vllm`, for the tests of one file: whoever starts it stops it."""
    home = VllmHome(CLONE)
    server = VllmServer(home, home.prepare_tiny_vision(print), max_model_len=2048, threads=1, cache_gib=1)
    server.start()
    return server


def other_weights(folder: Path) -> Path:
    """The tiny model with its last norm scaled, so that every token gets another probability."""
    return _scaled(MODEL_FILES, folder, "model.norm.weight", 1.1)


def other_eyes(folder: Path) -> Path:
    """The tiny model that sees, to which pictures look otherwise and text does not."""
    return _scaled(VISION_MODEL_FILES, folder, "model.connector.modality_projection.proj.weight", -3)


def _scaled(model: Path, folder: Path, tensor: str, factor: float) -> Path:
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + size])[tensor]["data_offsets"]
    start, end = 8 + size + start, 8 + size + end
    data[start:end] = array.array("f", [value * factor for value in array.array("f", bytes(data[start:end]))]).tobytes()
    file.write_bytes(data)
    return folder
