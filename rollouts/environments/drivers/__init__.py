"""Programs that start agents inside a sandbox, where nothing of ours is installed."""
