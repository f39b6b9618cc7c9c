"""The descriptor numbers by which tools talk to the broker: far from those that scripts use for their own redirections."""

from __future__ import annotations

SHELL_STATUS = 250  # written by bash: an exit code per command
SHELL_TERMINAL = 251  # where commands read and print
SHELL_COMMAND = 252  # a memory file with the command to run

CELL_CHANNEL = 250  # a socket: a frame asks for a cell, a frame answers
CELL_SOURCE = 251  # a memory file with the cell's source
