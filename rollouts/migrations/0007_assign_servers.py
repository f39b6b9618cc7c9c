"""Which LLM server a rollout is sampled by, decided in one place for all workers. docs/adr/0018-balancing.md has the reasons.

The server's rows are locked first, and everything is counted after that, each statement of a function seeing what was committed
before it: two claims cannot both take a server's last room, nor both find the same server idle.
"""

from django.db import migrations

# Servers that may be given work at the moment `at`, with the rollouts they may hold. One that is new or was dead until lately
# holds fewer for its first `slow_start` seconds, measured by the longest-serving one of its policy: a fleet that starts as a whole
# is not slowed down.
USABLE = """
CREATE FUNCTION rollouts_usable_servers(at timestamptz, slow_start double precision)
RETURNS TABLE (id uuid, policy_id uuid, policy_version integer, room integer) LANGUAGE sql STABLE AS $$
    SELECT s.id, s.policy_id, s.policy_version,
           GREATEST(1, floor(s.capacity * s.warmth / max(s.warmth) OVER (PARTITION BY s.policy_id)))::integer
    FROM (
        SELECT server.*, COALESCE(LEAST(1, GREATEST(0.1, EXTRACT(EPOCH FROM at - CASE server.health
            WHEN 'recovering' THEN server.health_since ELSE server.created_at END)::double precision / NULLIF(slow_start, 0)
        )), 1) AS warmth
        FROM rollouts_llmserver server
        WHERE server.admission = 'open' AND server.health IN ('live', 'recovering') AND server.hold = ''
    ) s
$$
"""

# A server for each of the wanted rollouts; one for which there is none is left out.
#
# Stickiness: a rollout that runs stays on its server, one that begins goes where most of its group is, since their prompts are in
# the prefix cache there. Both are left for the least busy server when that one is less busy by more than `slack` of the
# room. A rollout that runs is moved to a full server rather than nowhere.
#
# Versions: `required_version` of the rollout, else that of its group. In runs that want one version for a group or a rollout, what
# begins gets the newest version there is, the first of a group decides for it, and what runs stays with the version it was
# sampled from.
ASSIGN = """
CREATE FUNCTION rollouts_assign_servers(
    wanted uuid[], avoided uuid[], slack double precision, slow_start double precision, at timestamptz
) RETURNS TABLE (rollout_id uuid, server_id uuid) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    policies uuid[];
    ids uuid[];
    serves uuid[];
    versions integer[];
    rooms integer[];
    busy integer[];
    given_groups uuid[] := '{}';
    given_servers uuid[] := '{}';
    one record;
    best integer;
BEGIN
    SELECT array_agg(DISTINCT run.policy_id) INTO policies
    FROM rollouts_rollout r JOIN rollouts_run run ON run.id = r.run_id WHERE r.id = ANY(wanted);

    PERFORM FROM rollouts_llmserver s WHERE s.policy_id = ANY(policies) ORDER BY s.id FOR NO KEY UPDATE OF s;

    SELECT array_agg(s.id), array_agg(s.policy_id), array_agg(s.policy_version), array_agg(s.room), array_agg(running.n)
    INTO ids, serves, versions, rooms, busy
    FROM rollouts_usable_servers(at, slow_start) s CROSS JOIN LATERAL (
        SELECT count(*)::integer AS n FROM rollouts_rollout r WHERE r.llm_server_id = s.id AND r.state = 'running'
    ) running
    WHERE s.policy_id = ANY(policies) AND s.id <> ALL(avoided);

    FOR one IN
        SELECT r.id, r.group_id, run.policy_id, r.llm_server_id AS present, r.state = 'running' AS runs,
               COALESCE(run.settings ->> 'versions', 'mixed') AS rule,
               COALESCE(r.required_version, CASE run.settings ->> 'versions'
                   WHEN 'group' THEN g.policy_version
                   WHEN 'strict' THEN CASE WHEN r.state = 'running' THEN r.policy_version END
               END) AS version
        FROM unnest(wanted) WITH ORDINALITY AS w (id, place)
        JOIN rollouts_rollout r ON r.id = w.id JOIN rollouts_run run ON run.id = r.run_id
        JOIN rollouts_group g ON g.id = r.group_id ORDER BY w.place
    LOOP
        SELECT choice.i INTO best FROM (
            SELECT c.i, c.used, c.kin, c.used >= 1 AS filled, c.used - min(c.used) OVER () <= slack AS near
            FROM (
                SELECT i, versions[i] AS version, COALESCE(kin.n, 0) AS kin, max(versions[i]) OVER () AS newest,
                       (busy[i] - CASE WHEN one.runs AND ids[i] = one.present THEN 1 ELSE 0 END)::double precision / rooms[i]
                           AS used
                FROM generate_subscripts(ids, 1) AS i LEFT JOIN (
                    SELECT k.id, count(*) AS n FROM (
                        SELECT one.present WHERE one.runs
                        UNION ALL
                        SELECT r.llm_server_id FROM rollouts_rollout r
                        WHERE NOT one.runs AND r.group_id = one.group_id AND r.llm_server_id IS NOT NULL
                        UNION ALL
                        SELECT p.server FROM unnest(given_groups, given_servers) AS p (family, server)
                        WHERE NOT one.runs AND p.family = one.group_id
                    ) AS k (id) GROUP BY k.id
                ) kin ON kin.id = ids[i]
                WHERE serves[i] = one.policy_id
            ) c
            WHERE CASE WHEN one.version IS NOT NULL THEN c.version = one.version
                       ELSE one.rule = 'mixed' OR c.version = c.newest END
              AND (one.runs OR c.used < 1)
        ) choice
        ORDER BY choice.filled, CASE WHEN choice.near THEN choice.kin ELSE 0 END DESC, choice.used, choice.i LIMIT 1;
        CONTINUE WHEN best IS NULL;

        IF one.rule = 'group' AND one.version IS NULL THEN
            UPDATE rollouts_group g SET policy_version = versions[best] WHERE g.id = one.group_id AND g.policy_version IS NULL;
        END IF;
        busy[best] := busy[best] + 1;
        given_groups := given_groups || one.group_id;
        given_servers := given_servers || ids[best];
        rollout_id := one.id;
        server_id := ids[best];
        RETURN NEXT;
    END LOOP;
END $$
"""


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0006_sessions")]
    operations = [
        migrations.RunSQL(USABLE, "DROP FUNCTION rollouts_usable_servers"),
        migrations.RunSQL(ASSIGN, "DROP FUNCTION rollouts_assign_servers"),
    ]
