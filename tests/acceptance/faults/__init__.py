"""Faults while rollouts run: real processes, really killed, and a ledger of what became of every rollout.

`pytest tests/acceptance/faults` lets each fault strike once; `make faults` again and again, and prints a table.
"""
