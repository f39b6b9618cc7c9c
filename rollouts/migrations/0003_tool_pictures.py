import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0002_transition_trigger")]

    operations = [
        migrations.AddField(
            model_name="toolcall",
            name="limit_exceeded",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The sandbox's limit for which it was ended.",
                max_length=30,
            ),
        ),
        migrations.AddField(
            model_name="toolcall",
            name="note",
            field=models.TextField(blank=True, db_default="", default="", help_text="The tool's word about what was done."),
        ),
        migrations.AddField(
            model_name="toolcall",
            name="running",
            field=models.BooleanField(db_default=False, default=False, help_text="The command went on."),
        ),
        migrations.CreateModel(
            name="ToolPicture",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("attempt", models.PositiveIntegerField()),
                ("turn", models.PositiveIntegerField()),
                ("call", models.PositiveIntegerField(help_text="The call's place in its turn.")),
                ("index", models.PositiveIntegerField(help_text="Place in its call.")),
                ("mime", models.CharField(max_length=40)),
                (
                    "blob",
                    models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name="+", to="rollouts.blob"),
                ),
                (
                    "rollout",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="tool_pictures", to="rollouts.rollout"
                    ),
                ),
            ],
            options={
                "ordering": ["turn", "call", "index"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("rollout", "attempt", "turn", "call", "index"), name="tool_picture_place_once"
                    )
                ],
            },
        ),
    ]
