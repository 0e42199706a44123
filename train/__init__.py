"""Stage 4: batches to a checkpoint, under accelerate and DeepSpeed."""
