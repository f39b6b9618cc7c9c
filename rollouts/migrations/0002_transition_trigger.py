"""Refuse, in the database, any move that `rollouts.lifecycle.TRANSITIONS` does not allow, and any change of an attempt number but +1.

The table is repeated here on purpose: a migration must not change when the module does. A test compares the two.
"""

from django.db import migrations

MOVES = {
    "queued": ["initializing", "failed", "timed_out", "cancelled", "discarded"],
    "initializing": ["ready", "queued", "failed", "timed_out", "cancelled", "discarded"],
    "ready": ["running", "queued", "failed", "timed_out", "cancelled", "discarded"],
    "running": ["evaluating", "queued", "failed", "timed_out", "cancelled", "discarded"],
    "evaluating": ["succeeded", "queued", "failed", "timed_out", "cancelled", "discarded"],
}

# Only when EVAL had failed for the infrastructure's fault and RUN's own termination takes its place.
REPAIRS = {
    "failed": ["succeeded", "timed_out"],
    "timed_out": ["succeeded"],
}


def pairs(table):
    return ", ".join(f"('{old}', '{new}')" for old, news in table.items() for new in news)


CREATE = f"""
CREATE FUNCTION rollouts_check_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN ({pairs(MOVES)}) AND NOT (
        (OLD.state, NEW.state) IN ({pairs(REPAIRS)}) AND NEW.attempt = OLD.attempt
        AND OLD.termination_phase = 'eval' AND OLD.termination_blame = 'infrastructure' AND NEW.termination_phase = 'run'
    ) THEN
        RAISE EXCEPTION 'rollout % cannot move from % to %', OLD.id, OLD.state, NEW.state USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.attempt NOT IN (OLD.attempt, OLD.attempt + 1) THEN
        RAISE EXCEPTION 'rollout %: attempt % cannot follow %', OLD.id, NEW.attempt, OLD.attempt USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER rollouts_check_move BEFORE UPDATE OF state, attempt ON rollouts_rollout
    FOR EACH ROW EXECUTE FUNCTION rollouts_check_move();
"""

DROP = "DROP TRIGGER rollouts_check_move ON rollouts_rollout; DROP FUNCTION rollouts_check_move();"


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0001_initial")]
    operations = [migrations.RunSQL(CREATE, DROP)]
