"""The process that carries out rollouts: one asyncio loop, many rollouts, one lease.

`process` holds the loop, the lease and what is in hand; `stages` says what each stage does with a claimed rollout; `database`
is the only way from the loop to Postgres; `janitor` removes sandboxes nobody needs; `celery_worker` is where Celery comes in.
"""
