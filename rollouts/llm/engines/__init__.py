"""Steering model servers, which is not sampling: new weights, pauses, sleep. No Django."""
