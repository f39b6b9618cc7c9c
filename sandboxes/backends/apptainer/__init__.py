"""Sandboxes from Apptainer or SingularityCE: rootless, what administrators of HPC clusters already have. No Django.

The broker is process 1 of one long-lived `apptainer exec` that this package starts itself, with the channel's listening socket
as its standard input. Images, instances and inspection go through spython (`spython_calls`).
"""
