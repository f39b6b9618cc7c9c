from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("rollouts", "0008_weight_updates"),
    ]

    operations = [
        migrations.AddField(
            model_name="modelcall",
            name="conversation_key",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="By which the gateway finds what goes on from here.",
                max_length=100,
            ),
        ),
    ]
