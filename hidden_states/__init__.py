"""Stage 2: the hidden states of the target, captured, checked, cached and streamed."""
