"""A database with 1,000,000 rollouts, made once and kept until the schema changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psycopg
from psycopg import sql

from benchmarks.platform import ROOT
from benchmarks.report import say
from prorl_site.embedded.postgres import EmbeddedPostgres
from rollouts.run_settings import RunSettings

ROLLOUTS = 1_000_000
GROUP_SIZE = 8
LARGEST_RUN = 300_000

# 5 projects, 60 runs of very different sizes, 2,000 tasks, and two versions of each project's environments, the older one used
# only in the oldest runs: what is rare is not spread evenly, which is what surprises a query planner.
_SMALL_TABLES = """
SELECT setseed(0.5);
INSERT INTO rollouts_project (id, name, created_at, {project_columns})
SELECT uuidv7(), 'project-' || n, now() - interval '90 days', {project_values} FROM generate_series(1, 5) n;
INSERT INTO rollouts_policy (id, project_id, name, version, created_at)
SELECT uuidv7(), id, 'policy', 60, now() FROM rollouts_project;
INSERT INTO rollouts_environment (id, project_id, name, version, handler, config, description, created_at)
SELECT uuidv7(), p.id, e.name, v, 'arithmetic', '{{}}', '', now()
FROM rollouts_project p, (VALUES ('swe'), ('math')) e(name), generate_series(1, 2) v;
INSERT INTO rollouts_dataset (id, project_id, environment_id, name, created_at)
SELECT uuidv7(), project_id, id, name || '-' || version, now() FROM rollouts_environment;
INSERT INTO rollouts_task (id, dataset_id, key, payload, quarantine_reason, created_at)
SELECT uuidv7(), id,
    (ARRAY['django__django', 'sympy__sympy', 'astropy__astropy', 'flask__flask', 'gsm8k.train'])[1 + n % 5] || '-' || 10000 + n,
    '{{"a": 1, "b": 2}}', '', now()
FROM rollouts_dataset, generate_series(1, 100) n;
INSERT INTO rollouts_llmserver (id, project_id, policy_id, policy_version, url, model, api_key, capacity, max_model_len, engine,
    tokenizer, tool_format, admission, health, health_since, failures, hold, load, capabilities, last_error, created_at)
SELECT uuidv7(), project_id, id, 60, 'http://gpu:8000', 'm', '', 64, 8192, 'vllm',
    '', '', 'open', 'live', now(), 0, '', '{{}}', '{{}}', '', now() FROM rollouts_policy;
INSERT INTO rollouts_workerprocess (id, node, stage, pid, concurrency, started_at, lease_expires_at)
SELECT uuidv7(), 'node-' || n, stage, n, 256, now(), now() + interval '1 day'
FROM generate_series(1, 20) n, (VALUES ('init'), ('run'), ('eval')) s(stage);
CREATE TEMPORARY TABLE sizes AS
SELECT n, CASE WHEN n = 1 THEN {largest} ELSE greatest(round({rest} * (1.0 / n)
    / (SELECT sum(1.0 / m) FROM generate_series(2, 60) m))::int / 8 * 8, 8) END AS size
FROM generate_series(1, 60) n;
INSERT INTO rollouts_run (id, project_id, name, policy_id, priority, settings, created_at, {run_columns})
SELECT uuidv7(make_interval(hours => -24 * 80 + (n * 37 % 60) * 30)), p.id, 'run-' || n, policy.id, 50, {settings},
    now() - interval '80 days' + make_interval(hours => (n * 37 % 60) * 30), {run_values}
FROM sizes JOIN LATERAL (SELECT id FROM rollouts_project ORDER BY name OFFSET n % 5 LIMIT 1) p ON true
JOIN rollouts_policy policy ON policy.project_id = p.id;
"""

# Groups arrive over the five days after their run's beginning.
_GROUPS = """
CREATE TEMPORARY TABLE placed AS
SELECT run.id AS run_id, run.project_id, sizes.n AS place, sizes.size, g,
    run.created_at + interval '5 days' * g / (sizes.size / 8.0) AS at, g / (sizes.size / 8.0) AS age
FROM sizes JOIN rollouts_run run ON run.name = 'run-' || sizes.n, generate_series(0, sizes.size / 8 - 1) g;
CREATE TEMPORARY TABLE choices AS
SELECT dataset.project_id, version, array_agg(task.id) AS tasks
FROM rollouts_task task JOIN rollouts_dataset dataset ON dataset.id = dataset_id
JOIN rollouts_environment environment ON environment.id = environment_id GROUP BY 1, 2;
CREATE TEMPORARY TABLE grouped AS
SELECT uuidv7(at - now()) AS id, placed.*, 1 + floor(random() * 200)::int AS task_place
FROM placed ORDER BY at;
INSERT INTO rollouts_group (id, run_id, task_id, n, created_at)
SELECT id, run_id, tasks[task_place], 8, at FROM grouped
JOIN choices ON choices.project_id = grouped.project_id AND version = CASE WHEN place % 60 * 37 % 60 < 12 THEN 1 ELSE 2 END;
"""

# The last two runs are still going on: some of theirs wait or run. Of the others some ended badly, more at the beginning.
_ROLLOUTS = """
INSERT INTO rollouts_rollout (id, project_id, run_id, group_id, task_id, environment_id, "index", priority, state, attempt,
    infra_retries, lease_owner_id, node, sandbox_name, llm_server_id, policy_version, created_at, state_changed_at, finished_at,
    finished_xid, queue_seconds, init_seconds, run_seconds, eval_seconds, turns, prompt_tokens, sampled_tokens, fidelity,
    termination_phase, termination_cause, termination_blame, termination_detail, reward, trainable, artefacts{more_columns})
SELECT uuidv7(at - now()), project_id, run_id, id, task_id, environment_id, i, 50, state,
    CASE state WHEN 'queued' THEN 0 ELSE 1 END, CASE WHEN dice < 0.03 THEN 1 ELSE 0 END,
    CASE state WHEN 'running' THEN worker_id END,
    CASE state WHEN 'queued' THEN '' ELSE node END, '', CASE state WHEN 'queued' THEN NULL ELSE server_id END,
    CASE state WHEN 'queued' THEN NULL ELSE (age * 60)::int END, at, at + interval '5 minutes',
    CASE WHEN finished THEN at + interval '5 minutes' END, CASE WHEN finished THEN 1000 + row_number() OVER () / 50 END,
    10, 1, 200 + 200 * dice, 2, CASE state WHEN 'queued' THEN 0 ELSE 12 END, 4000, 2500,
    CASE WHEN NOT finished THEN '' WHEN dice < 0.01 THEN 'text-only' WHEN dice < 0.1 THEN 'segmented' ELSE 'token-exact' END,
    CASE WHEN finished THEN 'run' ELSE '' END, cause,
    CASE cause WHEN '' THEN '' WHEN 'cancelled' THEN 'caller' WHEN 'sandbox_error' THEN 'infrastructure'
        WHEN 'worker_lost' THEN 'infrastructure' ELSE 'policy' END, '',
    CASE WHEN cause IN ('completed', 'max_turns', 'agent_timeout', 'length')
        THEN CASE WHEN luck < 0.8 * age THEN 1 WHEN luck > 0.9 THEN round(luck::numeric - 0.9, 4) * 10 ELSE 0 END
    END, cause IN ('completed', 'max_turns', 'length'), '{{"answer": "an answer of the usual length"}}'{more_values}
FROM (
    SELECT chosen.*, CASE WHEN cause <> '' THEN
            CASE WHEN cause = 'cancelled' THEN 'cancelled' WHEN cause = 'agent_timeout' THEN 'timed_out'
                WHEN cause IN ('sandbox_error', 'worker_lost') THEN 'failed' ELSE 'succeeded' END
        WHEN dice < 0.05 THEN 'running' WHEN dice < 0.06 THEN 'ready' ELSE 'queued' END AS state, cause <> '' AS finished
    FROM (
        SELECT g.*, task.id AS task_id, dataset.environment_id, worker.id AS worker_id, worker.node, server.id AS server_id,
            CASE WHEN place <= 2 AND age > 0.97 THEN ''
                WHEN age < 0.05 AND dice < 0.1 THEN 'sandbox_error' WHEN dice < 0.002 THEN 'worker_lost'
                WHEN dice < 0.05 THEN 'agent_timeout' WHEN dice < 0.15 THEN 'max_turns' WHEN dice < 0.16 THEN 'length'
                WHEN dice < 0.165 THEN 'cancelled' ELSE 'completed' END AS cause
        FROM (SELECT grouped.*, i, random() AS dice, random() AS luck FROM grouped, generate_series(0, 7) i) g
        JOIN rollouts_group ON rollouts_group.id = g.id JOIN rollouts_task task ON task.id = rollouts_group.task_id
        JOIN rollouts_dataset dataset ON dataset.id = task.dataset_id
        JOIN rollouts_workerprocess worker ON worker.stage = 'run' AND worker.pid = 1 + floor(luck * 20)
        JOIN rollouts_llmserver server ON server.project_id = g.project_id
    ) chosen ORDER BY at, i
) ordered
"""

# The transactions that are said to have finished the rollouts must be over.
_SPEND_TRANSACTIONS = f"""
DO $$ BEGIN FOR n IN 1..{ROLLOUTS // 50 + 1000} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$
"""


def prepared_database() -> tuple[EmbeddedPostgres, Path]:
    """The started server and its folder. Databases of older schemas are removed."""
    sources = [*sorted(ROOT.glob("rollouts/migrations/0*.py")), Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    folder = ROOT / "var" / "bench" / f"list-{digest}"
    for other in folder.parent.glob("list-*"):
        if other != folder:
            shutil.rmtree(other)
    complete = folder / "complete"
    if folder.exists() and not complete.exists():
        shutil.rmtree(folder)
    postgres = EmbeddedPostgres(folder / "postgres", durable=False)
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "prorl_site.settings",
        "PRORL_DATABASE_URL": postgres.start(),
        "PRORL_SECRET_KEY": "benchmarks only",
        "PRORL_VAR_DIR": str(folder),
        "PRORL_DB_POOL_SIZE": "0",
        "PRORL_LOG_LEVEL": "ERROR",
    }
    if not complete.exists():
        try:
            subprocess.run([sys.executable, "-m", "django", "migrate", "--verbosity", "0"], check=True)
            _fill(postgres.url)
            complete.touch()
        except BaseException:
            postgres.stop()
            raise
    return postgres, folder


def _fill(url: str) -> None:
    begun = time.monotonic()
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")  # no foreign key is looked up a million times
        connection.execute("SET maintenance_work_mem = '512MB'")
        connection.execute("SET work_mem = '256MB'")
        project, run = (_defaults(connection, table) for table in ("rollouts_project", "rollouts_run"))
        rollout = _defaults(connection, "rollouts_rollout")
        connection.execute(
            _SMALL_TABLES.format(
                largest=LARGEST_RUN,
                rest=ROLLOUTS - LARGEST_RUN,
                project_columns=", ".join(project),
                project_values=", ".join(project.values()),
                run_columns=", ".join(run),
                run_values=", ".join(run.values()),
                settings=sql.quote(RunSettings().model_dump_json()),
            )
        )
        connection.execute(_GROUPS)
        indexes = connection.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'rollouts_rollout' AND indexname NOT IN "
            "(SELECT conname FROM pg_constraint WHERE conrelid = 'rollouts_rollout'::regclass)"
        ).fetchall()
        for name, _ in indexes:
            connection.execute(f'DROP INDEX "{name}"')
        more = "".join(f", {name}" for name in rollout)
        connection.execute(_ROLLOUTS.format(more_columns=more, more_values="".join(f", {value}" for value in rollout.values())))
        for _, definition in indexes:
            connection.execute(definition)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_SPEND_TRANSACTIONS)
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
    say(f"made {ROLLOUTS:,} rollouts in {time.monotonic() - begun:.0f} s")


_NAMED = {
    "rollouts_project": _SMALL_TABLES.split("rollouts_project (")[1].split("{")[0],
    "rollouts_run": _SMALL_TABLES.split("rollouts_run (")[1].split("{")[0],
    "rollouts_rollout": _ROLLOUTS.split("rollouts_rollout (")[1].split("{")[0],
}
_EMPTY = {"integer": "0", "bigint": "0", "smallint": "0", "double precision": "0", "boolean": "false", "jsonb": "'{}'"}


def _defaults(connection: psycopg.Connection[tuple[str, str]], table: str) -> dict[str, str]:
    """An empty value for every other column that must not be null: Django keeps no defaults in the database."""
    named = {name.strip().strip('"') for name in _NAMED[table].split(",")}
    rows = connection.execute(
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = %s AND is_nullable = 'NO' "
        "AND column_default IS NULL",
        [table],
    ).fetchall()
    return {f'"{name}"': _EMPTY.get(kind, "''") for name, kind in rows if name not in named}
