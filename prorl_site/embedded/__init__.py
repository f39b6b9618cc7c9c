"""What a single machine needs besides our own code: PostgreSQL, a broker, a model server, and a supervisor for all of them.

Nothing here is used on a cluster, where `PRORL_DATABASE_URL` and `PRORL_BROKER_URL` point at real servers. See
`docs/adr/0006-embedded-services.md` for the reasons.
"""
