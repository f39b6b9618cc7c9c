"""Measurements of what the platform costs and how quick it is; see README.md."""
