from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0002_images'),
    ]

    operations = [
        migrations.AlterField(
            model_name='sandbox',
            name='stopped_at',
            field=models.DateTimeField(help_text='Proven empty, unless it was abandoned.', null=True),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='stop_attempts',
            field=models.PositiveIntegerField(default=0, help_text='How often stopping it failed.'),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='stop_error',
            field=models.TextField(blank=True, default='', help_text='What survived the last of these.'),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='stop_retry_at',
            field=models.DateTimeField(help_text='It is tried again after this moment.', null=True),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='abandoned',
            field=models.BooleanField(default=False, help_text='Closed without proof: its node has been gone for too long.'),
        ),
    ]
