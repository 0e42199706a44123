"""Stage 5: a checkpoint to an acceptance report."""
