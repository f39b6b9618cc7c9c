"""Packs the broker into one file that the interpreter of a sandbox can run. No Django."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zipfile
from pathlib import Path

from sandboxes import broker
from sandboxes.errors import BackendUnavailable

# Goes before the bundle's path and the broker's arguments. Importing from an archive takes twice as long as this, and to look
# for garbage among what is being imported takes a tenth of the start.
START = """
import gc, marshal, sys
gc.disable()
sys.path.insert(0, sys.argv.pop(1))
with open(sys.path[0], "rb") as file:
    code = marshal.loads(file.read())
class Bundle:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return type(sys.__spec__)(name, Bundle, is_package=name == "broker") if name in code else None
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        exec(code[module.__name__], vars(module))
sys.meta_path.insert(0, Bundle)
from broker.main import main
main(sys.argv[1:])
"""

# What runs cells is imported from the archive, also by an image's interpreter, which may be of another version: `broker.worker`
# and what it imports.
_WORKER = ("__init__", "descriptors", "framing", "lean", "pictures", "worker")
_MOMENT = 1_000_000_000  # seconds; any that an archive can name
_COMPILE = """
import compileall, marshal, pathlib, sys
root = pathlib.Path(sys.argv[1])
code = {}
for path in sorted(root.glob("broker/*.py")):
    name = "broker" if path.stem == "__init__" else f"broker.{path.stem}"
    code[name] = compile(path.read_bytes(), str(path.relative_to(root)), "exec")
(root / "code").write_bytes(marshal.dumps(code))
sys.exit(not compileall.compile_dir(root, quiet=1, legacy=True, stripdir=root))
"""


def build_bundle(interpreter: str) -> bytes:
    """For `interpreter -c START BUNDLE ...`: the broker's byte code for that interpreter, then an archive with the worker.

    Blocks for about 0.1 s; build once and keep. Raises BackendUnavailable when the interpreter cannot compile the broker.
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
        archive = root / "archive"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as worker:
            for path in sorted(root.rglob("*.py*")):
                if path.stem in _WORKER:
                    os.utime(path, (_MOMENT, _MOMENT))
                    worker.write(path, path.relative_to(root))
        return (root / "code").read_bytes() + archive.read_bytes()
