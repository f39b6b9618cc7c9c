"""Talking to model servers: ids in, ids out, and never a sampled id decoded and encoded again. No Django."""
