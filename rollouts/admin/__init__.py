"""The admin: a registry to edit (projects, environments, servers, keys) and a history to read (runs, rollouts, workers)."""

from . import history, images, keys, nodes, policies, registry, servers, sessions, webhooks

__all__ = ["history", "images", "keys", "nodes", "policies", "registry", "servers", "sessions", "webhooks"]
