"""What the models and programs of `web_case` said."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rollouts.engine.tools import ToolResult, render_result

SWE_PROMPT = """<pr_description>
Consider the following PR description:
Add joblib in show_versions
joblib should be added to the dependencies listed in show_versions, or to the issue template when sklearn's version is > 0.20.
</pr_description>

Make changes to non-test files in /testbed in order to fix the issue, in a way that is general and consistent with the codebase.

1. Analyze the codebase by finding and reading relevant files
2. Create a script to reproduce the issue
3. Edit the source code to resolve the issue
4. Verify your fix works by running your script again
5. Test edge cases to ensure your fix is robust

You issue at least one command. The system executes it in a persistent shell and shows you the result. When you are done,
submit with the `submit` command; after that you cannot go on working on this task.

- MODIFY: regular source code files in /testbed
- DO NOT MODIFY: tests, configuration files (pyproject.toml, setup.cfg, etc.)

The shell's working directory and variables persist between commands.
Output longer than 16 kB is shortened in the middle.
A command that runs for more than 60 seconds is stopped.
There is no network.
Editing with sed or a heredoc is fine.
Do not start editors or pagers that wait for input.
Python 3.11 and pytest are installed.
The repository is at the commit the issue was reported for.
Think before each command, and say what you expect to see.
Keep commands small; one purpose each.
Good luck."""


class ToolText(NamedTuple):
    """One tool call and its outcome."""

    arguments: dict[str, Any]
    output: str = ""
    exit_code: int | None = 0
    duration: float = 0.21
    timed_out: bool = False
    truncated_bytes: int = 0
    error: str = ""
    name: str = "bash"

    @property
    def answer(self) -> str:
        result = ToolResult(
            self.output,
            exit_code=self.exit_code,
            timed_out=self.timed_out,
            truncated_bytes=self.truncated_bytes,
            error=self.error,
        )
        return render_result(result, max_chars=len(self.output))

    @property
    def raw(self) -> str:
        return f"<tool_call>\n{json.dumps({'name': self.name, 'arguments': self.arguments})}\n</tool_call>"


class TurnText(NamedTuple):
    """One reply (tool calls included, as sampled) and the calls it asked for."""

    said: str
    tools: tuple[ToolText, ...] = ()

    @property
    def reply(self) -> str:
        return "\n".join([self.said, *(tool.raw for tool in self.tools)])


_GREP = ToolText(
    {"command": "grep -rn 'def show_versions' --include=*.py ."}, "./sklearn/utils/_show_versions.py:101:def show_versions():\n"
)
_CAT = ToolText(
    {"command": "cat -n sklearn/utils/_show_versions.py"},
    "\n".join(
        f"{number:6}\t{line}"
        for number, line in enumerate(
            '''"""
Utility methods to print system info for debugging

adapted from :func:`pandas.show_versions`
"""
# License: BSD 3 clause

import platform
import sys
import importlib


def _get_sys_info():
    """System information

    Return
    ------
    sys_info : dict
        system and Python version information

    """
    python = sys.version.replace('\\n', ' ')

    blob = [
        ("python", python),
        ('executable', sys.executable),
        ("machine", platform.platform()),
    ]

    return dict(blob)


def _get_deps_info():
    """Overview of the installed version of main dependencies

    Returns
    -------
    deps_info: dict
        version information on relevant Python libraries

    """
    deps = [
        "pip",
        "setuptools",
        "sklearn",
        "numpy",
        "scipy",
        "Cython",
        "pandas",
    ]
'''.splitlines(),
            start=1,
        )
    ),
    duration=0.034,
)
_SED = ToolText(
    {"command": """sed -i '/"pandas",/a "joblib",' sklearn/utils/_show_versions.py && git diff --color"""},
    """\x1b[1mdiff --git a/sklearn/utils/_show_versions.py b/sklearn/utils/_show_versions.py\x1b[m
\x1b[1m--- a/sklearn/utils/_show_versions.py\x1b[m
\x1b[1m+++ b/sklearn/utils/_show_versions.py\x1b[m
\x1b[36m@@ -48,6 +48,7 @@\x1b[m def _get_deps_info():
         "Cython",
         "pandas",
\x1b[32m+        "joblib",\x1b[m
     ]
""",
    duration=0.041,
)
_FAILING = ToolText(
    {"command": "python -c 'import sklearn; sklearn.show_versions()'"},
    """Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/testbed/sklearn/__init__.py", line 64, in <module>
    from .base import clone
ModuleNotFoundError: No module named 'sklearn.__check_build._check_build'
""",
    exit_code=1,
    duration=0.87,
)
_SLOW = ToolText(
    {"command": "python setup.py build_ext --inplace"},
    "running build_ext\nbuilding 'sklearn.__check_build._check_build' extension\n",
    exit_code=None,
    timed_out=True,
    truncated_bytes=48_213,
    duration=60.0,
)
_REFUSED = ToolText(
    {"cmd": "pytest"}, exit_code=None, error="invalid arguments for bash: command: Field required", duration=0.0
)
_TESTS = ToolText(
    {"command": "python -m pytest -q sklearn/utils/tests/test_show_versions.py"},
    "...                                                                      [100%]\n3 passed in 0.42s\n",
    duration=1.3,
)

SWE_TURNS = (
    TurnText(
        """<think>
Okay, the user wants joblib to be among the dependencies that show_versions prints. First I need to find where the function
is defined. Since it is part of scikit-learn it should be under sklearn/utils.

I'll search for its definition rather than for all uses, to keep the output short.
</think>

THOUGHT: Find where `show_versions` is defined before changing anything.""",
        (_GREP,),
    ),
    TurnText("THOUGHT: It is defined in one place. Let me read that file to see how dependencies are listed.", (_CAT,)),
    TurnText(
        """<think>
The list `deps` is what matters. Adding "joblib" at the end is enough; the version lookup imports each module by name.
</think>
THOUGHT: `deps` is a plain list of module names, so adding `joblib` is enough. I apply the change and look at the import.""",
        (_SED, _FAILING),
    ),
    TurnText("THOUGHT: The extension modules are not built in this checkout. Try to build them in place.", (_SLOW,)),
    TurnText("THOUGHT: Building takes too long. The module itself can be tested without the extensions.", (_REFUSED,)),
    TurnText("THOUGHT: I used the wrong argument name. Run the module's tests.", (_TESTS,)),
    TurnText("joblib is now listed in the dependencies that `show_versions` prints, and the module's tests pass."),
)

ARITHMETIC_TURNS = (
    TurnText("<think>17 times 20 is 340, 17 times 3 is 51. Together 391, plus 4 is 395.</think>\nThe answer is \\boxed{395}."),
)

TRACEBACK = """Traceback (most recent call last):
  File "rollouts/engine/stages.py", line 88, in run_stage
    session = await backend.connect(name)
  File "sandboxes/backends/bubblewrap.py", line 141, in connect
    raise SandboxLost(f"{name}: the broker's socket is gone")
sandboxes.errors.SandboxLost: prorl-0193-1: the broker's socket is gone
"""
