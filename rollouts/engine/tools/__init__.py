"""Tools that the shipped agent can offer to a model, and how they are described and answered in text."""

from __future__ import annotations

from rollouts.engine.tools.base import Signature, Tool, ToolArguments, ToolResult, signature
from rollouts.engine.tools.bash import BashArguments, BashTool
from rollouts.engine.tools.edit import EditArguments, EditTool
from rollouts.engine.tools.offer import describe_tools
from rollouts.engine.tools.pictures import PictureChooser, none_shown
from rollouts.engine.tools.python import PythonArguments, PythonTool
from rollouts.engine.tools.results import cut_middle, render_result

__all__ = [
    "BashArguments",
    "BashTool",
    "EditArguments",
    "EditTool",
    "PictureChooser",
    "PythonArguments",
    "PythonTool",
    "Signature",
    "Tool",
    "ToolArguments",
    "ToolResult",
    "cut_middle",
    "describe_tools",
    "none_shown",
    "render_result",
    "signature",
]
