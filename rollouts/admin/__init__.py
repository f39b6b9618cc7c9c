"""The admin: a registry to edit (projects, environments, servers, keys) and a history to read (runs, rollouts, workers)."""

from . import history, keys, nodes, registry, servers, webhooks

__all__ = ["history", "keys", "nodes", "registry", "servers", "webhooks"]
