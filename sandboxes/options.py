"""What an administrator decides about the sandboxes of a node. No Django."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeOptions:
    """The `PRORL_*` settings that backends heed."""

    apptainer: str = ""  # the program; "": the first of apptainer and singularity on PATH
    apptainer_instances: bool = False  # each sandbox is an Apptainer instance, which administrators can list and stop
    full_network: bool = False  # sandboxes may have network mode `full`, which reaches the node's own services
    starts: int = 4  # sandboxes that are being started at the same time on this node
    starts_per_image: int = 2  # of these, how many from the same image
