"""Servers that were registered before a probe found out what they can do get nothing until one has."""

from django.db import migrations

LOOK_AGAIN = """
UPDATE rollouts_llmserver SET last_probe_at = NULL, health = CASE health WHEN 'live' THEN 'suspect' ELSE health END
WHERE NOT capabilities ? 'features'
"""


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0009_conversation_key")]
    operations = [migrations.RunSQL(LOOK_AGAIN, migrations.RunSQL.noop)]
