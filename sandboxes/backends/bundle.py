"""Packs the broker into one file that the interpreter of a sandbox can run. No Django."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zipfile
from pathlib import Path

from sandboxes import broker
from sandboxes.errors import BackendUnavailable

# Goes before the bundle's path and the broker's arguments. Running the bundle itself would import half of the standard library,
# and to look for garbage among what is being imported takes a tenth of the start.
START = "import gc, sys; gc.disable(); sys.path.insert(0, sys.argv.pop(1)); from broker.main import main; main(sys.argv[1:])"

# What an image's interpreter, which may be of another version, runs for the agent: `broker.worker` and what it imports.
_AS_SOURCE = ("__init__", "descriptors", "framing", "lean", "pictures", "worker")
_MOMENT = 1_000_000_000  # seconds; any that an archive can name
_COMPILE = """
import compileall, sys
sys.exit(not compileall.compile_dir(sys.argv[1], quiet=1, legacy=True, stripdir=sys.argv[1]))
"""


def build_bundle(interpreter: str) -> bytes:
    """A zip archive for `interpreter -c START BUNDLE ...`: the broker's byte code for that interpreter, and some sources.

    With the byte code the broker starts 10 ms earlier. Blocks for about 0.1 s; build once and keep. Raises BackendUnavailable
    when the interpreter cannot compile the broker.
    """
    with tempfile.TemporaryDirectory(prefix="prorl-broker-") as directory:
        root = Path(directory)
        (root / "broker").mkdir()
        for source in Path(broker.__path__[0]).glob("*.py"):
            (root / "broker" / source.name).write_bytes(source.read_bytes())
        for path in root.rglob("*.py"):
            os.utime(path, (_MOMENT, _MOMENT))  # so that the same sources make the same archive
        command = [interpreter, "-I", "-S", "-c", _COMPILE, directory]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise BackendUnavailable(f"{interpreter} cannot compile the broker: {compiled.stdout}{compiled.stderr}")
        archive = root / "bundle"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as bundle:
            for path in sorted(root.rglob("*.py*")):
                if path.suffix == ".pyc" or path.stem in _AS_SOURCE:
                    os.utime(path, (_MOMENT, _MOMENT))
                    bundle.write(path, path.relative_to(root))
        return archive.read_bytes()
