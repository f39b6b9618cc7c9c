"""The APIs that agents speak: reading their requests and writing their answers, and nothing else."""
