"""Root file systems for sandboxes: whose files they are, and how each kind becomes a root. No Django."""
