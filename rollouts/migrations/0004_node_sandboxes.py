from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0003_tool_pictures")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="sandbox_backend",
            field=models.CharField(default="", editable=False, max_length=20),
        ),
        migrations.AddField(
            model_name="node",
            name="sandbox_facts",
            field=models.JSONField(
                default=dict,
                editable=False,
                help_text="What its INIT workers found out: programs, versions, limit -> mechanism.",
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="sandbox_problem",
            field=models.TextField(default="", editable=False, help_text="Why no sandbox can be started on it."),
        ),
    ]
